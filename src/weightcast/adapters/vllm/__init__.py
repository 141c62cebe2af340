"""Adapter of vLLM's own weight transfer over HTTP."""
