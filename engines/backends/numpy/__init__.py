"""NumPy backend: runs each problem by its reference implementation, on any machine and without a compiler."""
