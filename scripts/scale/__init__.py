"""Check infer-server on several machines with real balancers, stores and clusters.

Every check is a module of this package with two functions: `add_arguments(parser)` declares its options, and
`run(arguments)` prints the measured numbers with their limits, and returns 0 if all limits are met, else 1.
"""
