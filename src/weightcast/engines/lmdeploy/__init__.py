"""LMDeploy's PyTorch engine, as its project ships it."""
