"""The reference engine: model, scheduler and OpenAI server.  Started by `launch.serve`."""
