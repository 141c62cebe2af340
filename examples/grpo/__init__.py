"""Shared parts of the examples: task, rollouts, learner, engines, options and bookkeeping.

The loops themselves are in the programs beside this folder.  Copy both to begin a job of your own.
"""
