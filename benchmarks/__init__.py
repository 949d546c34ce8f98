"""Measurements that stand in docs/benchmarks.md, each with the command that repeats it."""
