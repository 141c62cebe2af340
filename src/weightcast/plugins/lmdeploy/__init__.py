"""Our receiver inside LMDeploy's PyTorch engine.

LMDeploy has no plug-in point for this, so a launcher starts it: ``python -m weightcast.plugins.lmdeploy serve
api_server ...``, with LMDeploy's own arguments.  Processes: the API server, the engine process that it spawns, and one
worker for each rank (with one rank, the engine process itself).
"""
