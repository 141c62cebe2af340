"""Fixtures of several files."""

from tests.helpers.session_bench import bench as bench
