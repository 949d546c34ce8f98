"""Programs that make the measurements in docs/benchmarks."""
