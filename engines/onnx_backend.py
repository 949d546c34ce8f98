"""Implementation of ONNX's backend interface, onnx.backend.base, for onnx.backend.test and other tools.

    representation = EngineBackend.prepare(onnx.load("m.onnx"))
    (y,) = representation.run([x])

Open extents of the model are bound by the first call. Later calls with other extents, or other values of inputs that
decide about shapes, specialise the engine.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep, Device, DeviceType, namedtupledict

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.programs import plan_of
from infer_server.engines.errors import ConfigError, EngineError, InputError
from infer_server.engines.frontend.onnx_file import read_model
from infer_server.engines.ir.dtypes import as_in_memory, as_named
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.load.create import engine_of

Feeds = Mapping[str, Any]           # arrays; sequences as lists
_OF_THE_RUNNER = ("rtol", "atol")       # tolerances of a test, which onnx.backend.test also passes to the backend


class EngineBackend(Backend):
    """ONNX backend that compiles for this CPU without timing tactics, for models that run only a few times."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **options: Any) -> bool:
        """Return True if `prepare` accepts the model."""
        try:
            cls.prepare(model, device, **options)
        except EngineError:
            return False
        return True

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **options: Any) -> EngineRep:
        """Compile a model, at once if its input shapes are known, else at the first run.

        Parameters
        ----------
        model : onnx.ModelProto
        device : str
            Only "CPU".
        **options
            Fields of BuildConfig.

        Raises
        ------
        EngineError
            The model cannot be compiled. ConfigError if the device is not the CPU.
        """
        if not cls.supports_device(device):
            raise ConfigError(f"device '{device}': engines run on the CPU only")
        options = {name: value for name, value in options.items() if name not in _OF_THE_RUNNER}
        return EngineRep(model, BuildConfig.of({"timing": False, **options}))

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **options: Any) -> tuple[Any, ...]:
        return cls.prepare(model, device, **options).run(inputs)

    @classmethod
    def run_node(cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None,
                 **options: Any) -> tuple[Any, ...]:
        """Run one node on arrays, in opset `opset_version` or else the newest that the onnx package knows."""
        opset = options.pop("opset_version", onnx.defs.onnx_opset_version())
        return cls.run_model(_model_of(node, [np.asarray(x) for x in inputs], opset), inputs, device, **options)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        try:
            return bool(Device(device).type == DeviceType.CPU)
        except (AttributeError, ValueError):
            return False


class EngineRep(BackendRep):
    """Model and its engine, which is built for the open extents and deciding values of the first call."""

    def __init__(self, model: onnx.ModelProto, config: BuildConfig) -> None:
        initialised = {tensor.name for tensor in model.graph.initializer}
        values = [value for value in model.graph.input if value.name not in initialised]
        self._model, self._config = model, config
        self._inputs = [value.name for value in values]
        self._engine: Engine | None = None
        if not any(map(_is_open, values)):
            self._prepare()

    def run(self, inputs: Any, **options: Any) -> tuple[Any, ...]:
        """Run the model.

        Parameters
        ----------
        inputs : sequence or mapping
            Arrays in the order of the model's inputs, or by name.

        Returns
        -------
        namedtuple
            Outputs in the model's order; those whose names are identifiers are attributes, too.

        Raises
        ------
        EngineError
        """
        feeds = self._feeds(inputs)
        engine = self._built(feeds)
        results = engine.run(feeds)
        arrays = [as_named(results[io.name], io.dtype) for io in engine.outputs]
        return namedtupledict("Outputs", [io.name for io in engine.outputs])(*arrays)

    def plan_of(self, inputs: Any) -> Plan:
        """Return the plan that `run` uses for these inputs."""
        feeds = self._feeds(inputs)
        return self._built(feeds).plan_of(feeds)

    def _feeds(self, inputs: Any) -> Feeds:
        arrays = inputs if isinstance(inputs, Mapping) else dict(zip(self._inputs, inputs, strict=False))
        if len(inputs) != len(self._inputs) or set(arrays) != set(self._inputs):
            raise InputError(f"the model takes {len(self._inputs)} inputs, {', '.join(self._inputs)}; "
                             f"{len(inputs)} are given")
        return {name: value if isinstance(value, list) or value is None else as_in_memory(np.asarray(value))
                for name, value in arrays.items()}

    def _prepare(self) -> None:
        """Compile now, so that a model that cannot be compiled is rejected before the first call."""
        self._engine = self._compiled(None)

    def _built(self, feeds: Feeds) -> Engine:
        if self._engine is None:
            self._engine = self._compiled(feeds)
        return self._engine

    def _compiled(self, feeds: Feeds | None) -> Engine:
        return engine_of(plan_of(Builder(self._config), read_model(self._model), lambda inputs: feeds))


def _is_open(value: onnx.ValueInfoProto) -> bool:
    """Return True if the model leaves the rank or an extent of the input open."""
    kind = value.type.tensor_type
    return not kind.HasField("shape") or not all(d.HasField("dim_value") for d in kind.shape.dim)


def _model_of(node: onnx.NodeProto, inputs: Sequence[Array], opset: int) -> onnx.ModelProto:
    """Return a model of one node, with outputs of unspecified types."""
    names = [name for name in node.input if name]
    infos = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
             for name, array in zip(names, inputs, strict=False)]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], node.op_type, infos, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(node.domain, opset)])


prepare, run_model, run_node, supports_device = (EngineBackend.prepare, EngineBackend.run_model,
                                                 EngineBackend.run_node, EngineBackend.supports_device)
