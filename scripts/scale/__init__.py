"""Check infer-server on several machines with real balancers, stores and clusters.

Every check is a module of this package with two functions: `add_arguments(parser)` declares its options, and
`run(arguments)` prints the numbers beside their bars and returns 0 if all bars are met, else 1.
"""
