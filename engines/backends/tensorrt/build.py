"""Builds a TensorRT engine from an ONNX model, and reads the fused layers from TensorRT's log.

Networks are strongly typed: the model decides each tensor's precision. The optimisation profile covers batches from one
item to the maximum, and is tuned for the given batch.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from infer_server.engines.backends.tensorrt.runtime.library import Message, logged_errors, logger_of
from infer_server.engines.errors import ConfigError

_LAYER = re.compile(r"Layer\((?P<kind>[^)]*)\): (?P<name>.*?), Tactic: (?P<tactic>\S+), (?P<tensors>.*)")


class Layer(NamedTuple):
    """Layer of the engine: the nodes that TensorRT runs as one kernel."""
    name: str           # TensorRT's: the fused nodes, or the first and last of them
    kind: str
    tactic: str
    tensors: str        # "inputs -> outputs" with types and shapes


class Built(NamedTuple):
    """Serialised engine and its layers."""
    engine: bytes
    layers: tuple[Layer, ...]


def build(module: Any, model: bytes, name: str, batch: tuple[int, int], exact: bool) -> Built:
    """Build an engine.

    Parameters
    ----------
    module : module
        TensorRT's Python module.
    model : bytes
        Serialised ONNX model.
    name : str
        Name of the model, for errors.
    batch : (int, int)
        Batch to tune for, and the largest batch.
    exact : bool
        Disable TF32, so that float32 products keep their precision.

    Raises
    ------
    ConfigError
        TensorRT rejects a node or the network.
    """
    logger = logger_of(module)
    builder = module.Builder(logger)
    flags = module.NetworkDefinitionCreationFlag
    asked = [getattr(flags, flag) for flag in ("STRONGLY_TYPED", "EXPLICIT_BATCH") if hasattr(flags, flag)]
    network = builder.create_network(sum(1 << int(flag) for flag in asked))
    parser = module.OnnxParser(network, logger)
    if not parser.parse(model):
        faults = [parser.get_error(i) for i in range(parser.num_errors)]
        what = "; ".join(f"'{fault.node_name()}' ({fault.node_operator()}): {fault.desc()}" for fault in faults[:3])
        raise ConfigError(f"{name}: TensorRT does not take it: {what or logged_errors(logger)}")
    config = builder.create_builder_config()
    if exact:
        config.clear_flag(module.BuilderFlag.TF32)
    _add_profile(builder, config, network, batch)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise ConfigError(f"{name}: TensorRT builds no engine: {logged_errors(logger)}")
    return Built(bytes(engine), layers_of(logger.messages))


def _add_profile(builder: Any, config: Any, network: Any, batch: tuple[int, int]) -> None:
    profile, usual, most = builder.create_optimization_profile(), *batch
    for number in range(network.num_inputs):
        tensor = network.get_input(number)
        if -1 in tuple(tensor.shape):
            profile.set_shape(tensor.name, *(tuple(items if extent == -1 else extent for extent in tensor.shape)
                                             for items in (1, usual, most)))
    config.add_optimization_profile(profile)


def layers_of(messages: Sequence[Message]) -> tuple[Layer, ...]:
    """Return the layers that the log lists under "Engine Layer Information"."""
    listed = [text for _, text in messages if text.startswith("Engine Layer Information")]
    return tuple(Layer(found["name"], found["kind"], found["tactic"], found["tensors"])
                 for text in listed for found in _LAYER.finditer(text))
