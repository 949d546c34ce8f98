"""The NumPy backend: every problem by its own reference, on any machine, without a compiler."""
