"""Helpers for this process alone: peak memory, garbage collector pauses, blocking threads, backoff, an LRU cache."""
