"""The net: random small graphs, built in a random precision, against onnx.reference.

A graph that is refused with an EngineError is fine. A wrong number, another exception or a hang is a fault.

    tests/net/test_net.py               a few of each family, the same in every run
    python -m tests.net --examples 500  as many as you like; --seed and --family choose others
"""
