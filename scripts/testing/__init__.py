"""Helpers that tests share with scripts and benchmarks, which must not import tests.

    suite, recurrence, resize_cases     problems, and their comparison with the reference
    gpu                                 an emulated GPU, and problems for its kernels
    numpy_engine, numpy_server          engines with known results, and a server of them
    mute_client                         a gRPC client that does not read
"""
