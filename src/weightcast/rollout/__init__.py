"""The reference engine: model, scheduler and OpenAI server.  `launch.serve` starts it."""
