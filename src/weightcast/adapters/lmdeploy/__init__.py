"""Adapter of LMDeploy's PyTorch engine."""
