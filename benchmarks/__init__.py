"""Measurements that stand in docs/benchmarks, each with the command that repeats it."""
