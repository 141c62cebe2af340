"""Measured updates beside measured limits: what `weightcast bench` and the scripts in `benchmarks/` share."""
