"""Benchmarks of transport overhead of servers and clients: CPU microseconds per request, and latency."""
