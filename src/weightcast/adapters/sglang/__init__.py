"""Adapter of SGLang."""
