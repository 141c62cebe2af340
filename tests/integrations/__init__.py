"""Integrations with real trainers: TRL, verl, vLLM's trainer side, and classes for miles and xtuner."""
