"""Complete a model's configuration from its file without loading the model.

A plan describes its engine completely, an ONNX file only in part.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from infer_server.backend import BATCH, Described
from infer_server.config.autocomplete import complete
from infer_server.config.config import from_message
from infer_server.config.groups import with_devices
from infer_server.config.ragged import model_dims
from infer_server.protocol.codec import FROM_ENGINE
from infer_server.repository.folders import Source

_OPEN = "?"                 # extent that the file leaves open, or declares without certainty


def complete_source(source: Source, describe_plan: Callable[[Path], Described]) -> Source | None:
    """Return the source of an engine with a completed configuration, or None if only loading can complete it.

    Parameters
    ----------
    source : Source
        Version of a model with a plan or an ONNX file.
    describe_plan : callable
        Function that reads the inputs and outputs of a plan file.

    Raises
    ------
    ModelConfigError
        The configuration contradicts the file.
    EngineError, OSError
        The file cannot be read.
    """
    described = _describe_onnx(source) if source.is_onnx else describe_plan(source.file)
    if described is None:
        return None
    message = complete(with_devices(source.message, ()), source.name, described, source.file.name)
    if isinstance(described, _Onnx) and not (described.knows_ranks and source.message.HasField("max_batch_size")):
        message.ClearField("max_batch_size")        # marks the dims as uncertain
    return replace(source, message=message, config=from_message(message, is_complete=False))


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class _Onnx:
    """Description of the engine that will be built from an ONNX file."""
    inputs: Sequence[_Tensor]
    outputs: Sequence[_Tensor]
    max_batch: int
    metadata: Mapping[str, Any]
    knows_ranks: bool           # True if the file declares the rank of every output
    dependence: str = ""        # unknown before the build


def _describe_onnx(source: Source) -> _Onnx | None:
    """Describe the engine of an ONNX file before its build; None if too much is still open."""
    from infer_server.engines.frontend.onnx_file import outline_of
    config, max_batch = source.config, source.message.max_batch_size
    if config.sequences or config.ragged or config.build.uint8_input == "true":
        return None
    outline = outline_of(source.file)
    optional = {spec.name for spec in config.inputs if spec.is_optional}
    inputs = [*outline.inputs, *(each for each in outline.defaulted if each.name in optional)]
    if not all(each.dtype in FROM_ENGINE for each in (*inputs, *outline.outputs)) or any(
            each.extents is None for each in inputs):
        return None
    tensors = [_Tensor(each.name, each.dtype, _leading(each.extents or ())) for each in inputs]
    first = BATCH if any(BATCH in tensor.shape for tensor in tensors) else _OPEN
    ranks = {spec.name: len(model_dims(spec)) + (max_batch > 0) for spec in source.message.output}
    unranked = [each.name for each in outline.outputs if each.extents is None]
    if not source.message.HasField("max_batch_size") and not ranks.keys().isdisjoint(unranked):
        return None                             # dims may or may not include the batch axis

    def shape(output: str, extents: Sequence[Any] | None) -> tuple[str, ...]:
        """Return an output's shape with open extents: they follow from the nodes, not from the declaration."""
        rank = ranks.get(output, 1) if extents is None else len(extents)
        return (first, *[_OPEN] * (rank - 1)) if rank else ()

    return _Onnx(tensors, [_Tensor(each.name, each.dtype, shape(each.name, each.extents)) for each in outline.outputs],
                 (max_batch or 1) if first == BATCH else 0,
                 {"defaults": {each.name: None for each in outline.defaulted}}, not unranked)


def _leading(extents: Sequence[int | str | None]) -> tuple[int | str, ...]:
    """Return an input's shape; a leading extent that the file leaves open is the batch."""
    return tuple(extent if isinstance(extent, int) else _OPEN if axis else BATCH for axis, extent in enumerate(extents))
