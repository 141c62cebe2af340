"""vLLM as it comes: its own weight-transfer API over HTTP, or a worker extension of ours where it has none."""
