"""Models of the soak test and their expected answers: some run on engines, some in Python."""
from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from infer_server.engines import build_engine

# y = 2 x + 1 of 4 numbers: one that stays loaded, one that is reloaded repeatedly, one that is loaded and unloaded, and
# one in Python whose processes are killed.
STEADY, RELOADED, PASSING, MORTAL = "steady", "reloaded", "passing", "mortal"
CHAIN = "chain"                     # an ensemble of the first two: y = 4 x + 3
SUM = "sum"                         # adds the numbers of a sequence so far
COUNTED = "counted"                 # in Python, decoupled: as many responses as the request says, numbered
DIGITS = "digits"                   # the network of scripts/demo, which takes most of the time
DIGITS_BATCH = 32                   # images a request

_NETWORK = Path(__file__).parent.parent / "demo_data" / "model.onnx"
_TENSORS = """ max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_FP32 dims: 4 }"""
_MORTAL = """
import os, pathlib
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        pathlib.Path(args["model_repository"], "pid").write_text(str(os.getpid()))

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(
            "y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy() * 2 + 1)]) for request in requests]
"""
_COUNTED = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for i in range(int(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0, 0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full((1, 4), i, np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_STEP = 'step {{ model_name: "{}" input_map {{ key: "x" value: "{}" }} output_map {{ key: "y" value: "{}" }} }}'
_CHAIN = f'''platform: "ensemble" {_TENSORS} ensemble_scheduling {{
    {_STEP.format(STEADY, "x", "between")}
    {_STEP.format(RELOADED, "between", "y")} }}'''
_SUM = """max_batch_size: 8 output { name: "sum" data_type: TYPE_FP32 dims: 4 }
sequence_batching { oldest { max_candidate_sequences: 16 } max_sequence_idle_microseconds: 600000000
    state { input_name: "before" output_name: "sum" data_type: TYPE_FP32 dims: 4 } }"""


def write_repository(folder: Path) -> None:
    affine = _model([helper.make_node("Mul", ["x", "two"], ["doubled"]),
                     helper.make_node("Add", ["doubled", "one"], ["y"])], ["x"], "y")
    for name in (STEADY, RELOADED, PASSING):
        _write_plan(folder / name, affine, 8)
    total = _model([helper.make_node("Add", ["x", "before"], ["sum"])], ["x", "before"], "sum")
    _write_plan(folder / SUM, total, 8, _SUM)
    _write_plan(folder / DIGITS, onnx.load(_NETWORK), DIGITS_BATCH)
    for name, code, config in ((MORTAL, _MORTAL, _TENSORS),
                               (COUNTED, _COUNTED, _TENSORS + " model_transaction_policy { decoupled: true }")):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(code)
        (folder / name / "config.pbtxt").write_text(f'backend: "python" {config}')
    (folder / CHAIN / "1").mkdir(parents=True)
    (folder / CHAIN / "config.pbtxt").write_text(_CHAIN)


def _model(nodes: list[onnx.NodeProto], inputs: list[str], output: str) -> onnx.ModelProto:
    """Return a model of tensors [N, 4], with the constants `one` and `two`."""
    def tensor(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4])

    constants = [helper.make_tensor(name, TensorProto.FLOAT, [1], [value]) for name, value in (("one", 1), ("two", 2))]
    graph = helper.make_graph(nodes, output, [tensor(name) for name in inputs], [tensor(output)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _write_plan(folder: Path, model: onnx.ModelProto, max_batch: int, config: str = "") -> None:
    (folder / "1").mkdir(parents=True)
    build_engine(model, max_batch=max_batch, timing=False, cache=False).save(folder / "1" / "model.plan")
    if config:
        (folder / "config.pbtxt").write_text(config)
