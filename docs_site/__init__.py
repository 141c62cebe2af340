"""Builds the parts of the docs site that are not files in ``docs/``."""
