"""Engines of plans in memory: options, creation, and compilation by the compiler of what a plan lacks."""
