"""Move freshly trained weights from an RL trainer into running LLM rollout engines."""

__version__ = "0.1.0"
