"""The receiving half: what lives beside the model in an engine.  Imports nothing of the trainer's half."""

from weightcast.receiver.rank import WeightReceiver

__all__ = ["WeightReceiver"]
