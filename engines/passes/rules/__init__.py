"""Rewriting rules, equal in float: one idea a file, its equation on top. pipeline.py says in which order they run."""
