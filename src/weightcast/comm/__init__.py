"""Mechanisms that know bytes and ranks, and no engine."""
