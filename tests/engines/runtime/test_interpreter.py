"""Tests of handwritten programs."""
import numpy as np

from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.serialize import node_to_json
from infer_server.engines.plan.program import Instruction, Region
from infer_server.engines.runtime.interpreter import Runner


def instruction(op, inputs, outputs, **attrs):
    return Instruction(op, op, tuple(inputs), tuple(outputs), node=node_to_json(Node(op, inputs, outputs, attrs)))


def test_an_output_that_the_model_does_not_have_is_no_absent_input_of_what_follows():
    region = Region(("x",), ("z",), (
        instruction("Unique", ("x",), ("y", "", "inverse", "")),
        instruction("Slice", ("y", "starts", "ends", "", "steps"), ("z",))))
    runner = Runner(region, [], {name: np.array([n]) for name, n in (("starts", 1), ("ends", 4), ("steps", 2))})
    for _ in range(2):
        z, = runner.run([np.array([5, 3, 5, 9, 7])], {})
        assert z.tolist() == [5, 9]


def test_what_an_operator_makes_beside_or_without_what_the_model_names_moves_nothing():
    """Unique has four outputs, NonZero one."""
    region = Region(("x",), ("none", "y", "z"), (
        instruction("Unique", ("x",), ("y",)),
        instruction("NonZero", ("x",), ("all", "none", *"abcdef")),
        instruction("Identity", ("x",), ("z",))))
    none, y, z = Runner(region, [], {}).run([np.array([5, 3, 5])], {})
    assert none is None and y.tolist() == [3, 5] and z.tolist() == [5, 3, 5]
