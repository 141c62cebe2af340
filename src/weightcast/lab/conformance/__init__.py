"""Checks whether a running engine keeps what weightcast promises about it."""
