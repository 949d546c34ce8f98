"""What the way to a model costs a server, less what the model computes: CPU microseconds a request, and latency."""
