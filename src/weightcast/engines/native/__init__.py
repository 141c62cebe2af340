"""Engines with the weightcast receiver."""
