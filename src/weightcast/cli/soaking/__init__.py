"""What ``weightcast bench soak`` is made of: engines, a trainer, load, and those who look for what went wrong."""
