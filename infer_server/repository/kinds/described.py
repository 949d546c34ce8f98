"""A model's configuration as its file completes it, without loading the model: a plan says what its engine will be, and
an ONNX file much of that."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from infer_server.backend import BATCH, Described
from infer_server.config.autocomplete import complete
from infer_server.config.config import from_message
from infer_server.config.groups import placed
from infer_server.config.ragged import model_dims
from infer_server.protocol.codec import FROM_ENGINE
from infer_server.repository.folders import Source

_OPEN = "?"                 # an extent that a file leaves open, or may say wrongly


def completed(source: Source, describe_plan: Callable[[Path], Described]) -> Source | None:
    """The source of an engine with its configuration completed; None: that is not known before it is loaded.

    describe_plan: what a plan file says. Raises ModelConfigError: the configuration and the file contradict each other;
    EngineError, OSError: the file cannot be read.
    """
    described = _of_onnx(source) if source.is_onnx else describe_plan(source.file)
    if described is None:
        return None
    message = complete(placed(source.message, ()), source.name, described, source.file.name)
    if isinstance(described, _Onnx) and not (described.knows_ranks and source.message.HasField("max_batch_size")):
        message.ClearField("max_batch_size")        # nobody is to take the dims for sure
    return replace(source, message=message, config=from_message(message, is_complete=False))


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class _Onnx:
    """What an ONNX file says of the engine that will be built from it."""
    inputs: Sequence[_Tensor]
    outputs: Sequence[_Tensor]
    max_batch: int
    metadata: Mapping[str, Any]
    knows_ranks: bool           # of all outputs; others' are as the configuration says
    dependence: str = ""        # nobody knows it before the build


def _of_onnx(source: Source) -> _Onnx | None:
    """What is known of the engine before its build; None: the file, or the build's options, leave too much open."""
    from engines.frontend.onnx_file import outline_of
    config, asked = source.config, source.message.max_batch_size
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
    ranks = {spec.name: len(model_dims(spec)) + (asked > 0) for spec in source.message.output}
    unranked = [each.name for each in outline.outputs if each.extents is None]
    if not source.message.HasField("max_batch_size") and not ranks.keys().isdisjoint(unranked):
        return None                             # its dims may have the batch or not

    def shape(output: str, extents: Sequence[Any] | None) -> tuple[str, ...]:
        """Extents of outputs follow from the nodes, whatever is declared."""
        rank = ranks.get(output, 1) if extents is None else len(extents)
        return (first, *[_OPEN] * (rank - 1)) if rank else ()

    return _Onnx(tensors, [_Tensor(each.name, each.dtype, shape(each.name, each.extents)) for each in outline.outputs],
                 (asked or 1) if first == BATCH else 0, {"defaults": {each.name: None for each in outline.defaulted}},
                 not unranked)


def _leading(extents: Sequence[int | str | None]) -> tuple[int | str, ...]:
    """The shape of an input, the batch in front if the file leaves that open."""
    return tuple(extent if isinstance(extent, int) else _OPEN if axis else BATCH for axis, extent in enumerate(extents))
