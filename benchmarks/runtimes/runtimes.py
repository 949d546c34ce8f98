"""Compared runtimes behind one interface: a model loaded for feeds of one shape and a number of threads.

Each is set up as its documentation advises for one request at a time: inputs are placed beforehand, shapes are fixed,
and outputs are not copied inside the inference. Every figure includes a Python call: some 10 us for OpenVINO, less for
the others. This matters for models of 100 us, not for larger ones.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from infer_server.engines import load_engine
from infer_server.engines.ir.graph import Array

OURS, OPENVINO, ORT = "infer-server", "OpenVINO", "ONNX Runtime"
Feed = Mapping[str, Array]          # every model input by its name


class Session(Protocol):
    note: str                       # remark for the report about how the runtime runs the model, or ""

    def set_inputs(self, feed: Feed) -> None:
        """Copy a feed of the loaded shapes into the buffers that `infer` reads."""

    def infer(self) -> None:
        """Run one inference on the feed of set_inputs()."""

    def outputs(self) -> list[Array]:
        """Return copies of the last inference's outputs, in the model's order."""


class InferServer:
    """Our runtime: a plan in one context."""
    note = ""

    def __init__(self, plan: Path, feed: Feed, precision: str, threads: int) -> None:
        self._engine = load_engine(plan, threads)
        self._context = self._engine.create_context()
        self._batch = next((len(feed[io.name]) for io in self._engine.inputs if io.batched), 1)
        self.set_inputs(feed)

    def set_inputs(self, feed: Feed) -> None:
        for name, array in feed.items():
            self._context.input(name, self._batch)[...] = array

    def infer(self) -> None:
        self._context.execute(self._batch)

    def outputs(self) -> list[Array]:
        return [self._context.output(io.name, self._batch).copy() for io in self._engine.outputs]


class OnnxRuntime:
    """ONNX Runtime's CPU provider, with bound inputs and outputs and symbolic dimensions fixed to the feed's."""
    note = ""

    def __init__(self, model: Path, feed: Feed, precision: str, threads: int) -> None:
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Else its threads would spin during the turns of other runtimes.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        for name, extent in _symbolic_extents(model, feed).items():
            options.add_free_dimension_override_by_name(name, extent)
        self._session: Any = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        for output in self._session.get_outputs():
            self._binding.bind_output(output.name)
        self.set_inputs(feed)

    def set_inputs(self, feed: Feed) -> None:
        self._feed = {name: np.ascontiguousarray(array) for name, array in feed.items()}    # bound by address
        for name, array in self._feed.items():
            self._binding.bind_cpu_input(name, array)

    def infer(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def outputs(self) -> list[Array]:
        return [np.array(value) for value in self._binding.copy_outputs_to_cpu()]


class OpenVino:
    """OpenVINO on an ONNX file or its own .xml, reshaped to the feed, with one stream."""

    def __init__(self, model: Path, feed: Feed, precision: str, threads: int) -> None:
        import openvino as ov
        self._tensor = ov.Tensor
        hints: dict[str, object] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        if precision != "int8":         # in INT8 it chooses the precision of layers that stay in float
            hints["INFERENCE_PRECISION_HINT"] = {"fp32": "f32", "bf16": "bf16"}[precision]
        core = ov.Core()
        network = core.read_model(model)
        network.reshape({port.any_name: list(feed[port.any_name].shape) for port in network.inputs})
        compiled = core.compile_model(network, "CPU", hints)
        arithmetic = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        self.note = "computes in f32: no bf16 on this CPU" if (precision, arithmetic) == ("bf16", "f32") else ""
        self._request: Any = compiled.create_infer_request()
        self._names = [port.any_name for port in network.inputs]
        self._outputs = range(len(network.outputs))
        self.set_inputs(feed)

    def set_inputs(self, feed: Feed) -> None:
        self._feed = [np.ascontiguousarray(feed[name]) for name in self._names]
        for i, array in enumerate(self._feed):
            self._request.set_input_tensor(i, self._tensor(array, shared_memory=True))

    def infer(self) -> None:
        self._request.infer(share_outputs=True)

    def outputs(self) -> list[Array]:
        return [self._request.get_output_tensor(i).data.copy() for i in self._outputs]


LOADERS: Mapping[str, Callable[[Path, Feed, str, int], Session]] = {
    OURS: InferServer, OPENVINO: OpenVino, ORT: OnnxRuntime}


def versions() -> dict[str, str]:
    """Return the versions of the peers and their quantisers that are installed."""
    packages = ("openvino", "onnxruntime", "nncf")
    return {package: version(package) for package in packages if find_spec(package)}


def _symbolic_extents(model: Path, feed: Feed) -> dict[str, int]:
    """Return the value in the feed of each symbolic dimension of the inputs, by name."""
    import onnx
    return {dim.dim_param: extent
            for value in onnx.load(model, load_external_data=False).graph.input if value.name in feed
            for dim, extent in zip(value.type.tensor_type.shape.dim, feed[value.name].shape, strict=True)
            if dim.dim_param}
