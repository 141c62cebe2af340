"""Digests of weights: their definition, the kernel that computes them, and sums taken while bytes are copied."""
