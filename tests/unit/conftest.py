"""Fixtures of several files."""

from tests.unit.session_bench import bench as bench
