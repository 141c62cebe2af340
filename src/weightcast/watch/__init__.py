"""What operators see of an update: events, and what listens to them."""
