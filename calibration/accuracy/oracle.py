"""Oracle of a verification, which computes a model's expected outputs by ONNX Runtime or else the NumPy reference.

The reference evaluates the imported graph node by node, or for a model that is not a single graph, a program built for
the target "numpy".
"""
from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from infer_server.calibration.data.items import Feed
from infer_server.engines.compiler.build import build_engine
from infer_server.engines.compiler.specialise import Specialiser
from infer_server.engines.frontend.inputs import Value
from infer_server.engines.frontend.onnx_file import with_outputs
from infer_server.engines.frontend.onnx_import import graph_from_onnx, recurs_in_float16, values_of_inputs
from infer_server.engines.ir.dtypes import as_named
from infer_server.engines.ir.graph import Array, Dim, Graph
from infer_server.engines.ir.recipe import Pixels
from infer_server.engines.ops.reference import run
from infer_server.engines.passes.pixels import take_pixels
from infer_server.engines.plan.extents import extents_of_feed
from infer_server.engines.plan.plan import Plan

ERRORS_ONLY = 3
_STRANGERS = tuple(f"tensor({name}" for name in ("bfloat16", "float8", "float4", "int4", "uint4", "int2", "uint2"))


@dataclass(frozen=True)
class Oracle:
    """Source of expected outputs.

    name    name in reports
    answer  returns the outputs for one feed
    slow    True if an item takes seconds
    """
    name: str
    answer: Callable[[Feed], dict[str, Array]]
    slow: bool = False


def oracle_of(model: str | Path, shapes: Mapping[str, Sequence[Dim | None]] | None = None,
              constants: Mapping[str, Value] | None = None, *, keep_batch: bool = False,
              pixels: Pixels | None = None, plan: Plan | None = None, shown: Sequence[str] = ()) -> Oracle:
    """Return the best available oracle for an ONNX file whose engine was built with these options.

    ONNX Runtime runs the file unchanged. Models that it rejects (a type, an operator) run on the reference, with open
    extents on the graphs of the plan's model.

    shown: inner tensors to return with the outputs, as far as possible. Raises ModelError if the model cannot be read.
    """
    refused = ""
    if importlib.util.find_spec("onnxruntime") is not None:
        try:
            return _onnx_runtime(Path(model), constants or {}, pixels, shown)
        except Exception as error:      # ONNX Runtime raises a different class for each status
            refused = f"; ONNX Runtime refuses the model: {str(error).splitlines()[0]}"
    if plan is not None and plan.open is not None:
        return replace(reference_of_specialisations(plan, stored=False), name=f"the NumPy reference{refused}")
    if plan is not None and plan.program is not None:
        engine = build_engine(model, target="numpy", timing=False, cache=False, shapes=dict(shapes or {}),
                              constants=dict(constants or {})).engine()
        return Oracle(f"the NumPy reference{refused}", engine.run, slow=True)
    graph = graph_from_onnx(model, shapes=shapes, constants=constants, keep_batch=keep_batch)
    graph = take_pixels(graph, pixels) if pixels else graph
    watch = [*graph.outputs, *(name for name in shown if name in graph.types)]
    return Oracle(f"the NumPy reference{refused}", lambda feed: run(graph, _typed(feed, graph), watch), slow=True)


def _array_of(value: Any) -> Any:
    """Convert an output to what an engine gives: strings to objects, maps of classes to rows of probabilities."""
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return np.array([[*row.values()] for row in value], np.float32)
    if isinstance(value, list):
        return value
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "US" else array


def reference_of(graph: Graph) -> Oracle:
    """Return an oracle that evaluates a plan's quantised graph in NumPy: differences are due to its compilation."""
    return Oracle("the NumPy reference of its quantised graph", lambda feed: run(graph, _typed(feed, graph)), slow=True)


def reference_of_specialisations(plan: Plan, stored: bool = True) -> Oracle:
    """Return an oracle that evaluates the graph of each specialisation; stored: the quantised one, else in float."""
    specialiser = Specialiser(plan)

    def answer(feed: Feed) -> dict[str, Array]:
        part = plan.open_part
        extents = extents_of_feed(plan.name, part.inputs, part.deciding, feed)
        graph = specialiser.graph(extents) if stored else specialiser.float_graph(extents)
        return run(graph, _typed({name: feed[name] for name in graph.inputs}, graph))

    return Oracle("the NumPy reference of its quantised graph", answer, slow=True)


def _typed(feed: Feed, graph: Graph) -> dict[str, Array]:
    """Convert bits that are fed to an engine to the named dtypes that NumPy lacks."""
    return {name: as_named(array, graph.types[name].dtype.name) for name, array in feed.items()}


def _onnx_runtime(model: Path, constants: Mapping[str, Value], pixels: Pixels | None,
                  shown: Sequence[str] = ()) -> Oracle:
    if recurs_in_float16(model):        # 1.31 ends the process as it opens one
        raise ValueError("it crashes on recurrent layers of float16")
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.log_severity_level = ERRORS_ONLY
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model.parent))
    source = (with_outputs(model, shown) if shown else None) or str(model)
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    kinds = {value.type for value in (*session.get_inputs(), *session.get_outputs())}
    if strangers := sorted(kind for kind in kinds if kind.startswith(_STRANGERS)):
        raise ValueError(f"its Python interface has no {strangers[0]}")
    names = [output.name for output in session.get_outputs()]
    fixed = values_of_inputs(model, constants)
    shapes = {value.name: value.shape for value in session.get_inputs()}
    floats = {value.name for value in session.get_inputs() if value.type == "tensor(float)"}

    def answer(feed: Feed) -> dict[str, Array]:
        if pixels:
            feed = {name: _normalised(array, pixels, shapes[name]) if name in floats and array.dtype == np.uint8
                    else array for name, array in feed.items()}
        return dict(zip(names, map(_array_of, session.run(names, {**feed, **fixed})), strict=True))

    return Oracle(f"ONNX Runtime {onnxruntime.__version__}", answer)


def _normalised(images: Array, pixels: Pixels, shape: Sequence[Any]) -> Array:
    """Convert uint8 images [N, H, W, C] to the model's float32 input of this shape, channels first or last."""
    real = images.astype(np.float32) * np.array(pixels.scale, np.float32) + np.array(pixels.shift, np.float32)
    return np.ascontiguousarray(real.transpose(0, 3, 1, 2) if shape[1] == len(pixels.scale) else real)
