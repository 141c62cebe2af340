"""The targets of one trainer: probes, health and membership."""
