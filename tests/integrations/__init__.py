"""Integrations with real trainers: TRL, verl, vLLM's trainer side, a recipe for miles, and a class for xtuner."""
