"""Adapters of vLLM: its own weight transfer over HTTP, or our worker extension where a version has none."""
