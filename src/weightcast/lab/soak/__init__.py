"""``weightcast bench soak``: engines, a trainer, load, and checks of what each of them does."""
