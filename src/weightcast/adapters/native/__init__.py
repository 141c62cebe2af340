"""Adapter of engines with the weightcast receiver."""
