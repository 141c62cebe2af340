"""Measures updates beside the limits of the machine, for ``weightcast bench`` and the scripts in ``benchmarks/``."""
