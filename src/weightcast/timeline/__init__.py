"""The time of every rank in one update, on one clock."""
