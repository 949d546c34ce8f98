"""Requests of different lengths in one batch: inputs are padded by zeros to the next bucket, outputs are cut again.

The parameter `ragged: "pad"` asks for it, for a model with one open extent besides the batch. A trial at load shows
that the model ignores what is padded: a masked encoder does, an average over all tokens does not.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.backend import BATCH, Engine, ExecutionContext, is_mixed, precision_of
from infer_server.batching.engine_executor import EngineExecutor, copy_into
from infer_server.batching.request import Outcome, Request
from infer_server.config.config import ModelConfig
from infer_server.engines.errors import EngineError, InputError
from infer_server.errors import ModelConfigError

_LARGEST = 1 << 16          # largest bucket that is made by default
_MAX_BUCKETED = 64           # below, another shape's context takes longer than the padding up to a default bucket
_TRIED = 16                 # the trial uses the first bucket of at least this extent
_CLOSE = 1e-3               # difference over the largest value of an output, for float32
_ROUNDED = 3e-2             # for other precisions


@dataclass(frozen=True)
class Padding:
    """Padded axes of a model's inputs and outputs, batch included, and the buckets: extents in ascending order."""
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    buckets: tuple[int, ...]
    max_bucketed: int = _LARGEST    # batches of longer requests are padded to the longest of them, others to a bucket

    def padded(self, name: str, item: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an input's item, without the batch axis, in the bucket that it falls into."""
        axis = self.inputs[name] - 1
        return (*item[:axis], self.bucket(item[axis]), *item[axis + 1:])

    def bucket(self, extent: int) -> int:
        """Return the least bucket of at least this extent, or the extent if there is none."""
        index = bisect_left(self.buckets, extent)
        return self.buckets[index] if index < len(self.buckets) else extent

    def extent(self, longest: int) -> int:
        """Return the extent that a batch is executed at, by that of its longest request."""
        return longest if longest > self.max_bucketed else self.bucket(longest)


def padding_of(config: ModelConfig, engine: Engine, context: ExecutionContext) -> Padding | None:
    """Return the padding that a configuration requests; None if it requests none.

    Raises
    ------
    ModelConfigError
        The model has no batch axis or another number of open extents, or its outputs depend on the padding.
    """
    if not config.build.ragged:
        return None
    names = {extent for tensor in engine.inputs for extent in tensor.shape if isinstance(extent, str)} - {BATCH}
    axes = {tensor.name: [axis for axis, extent in enumerate(tensor.shape) if extent in names]
            for tensor in engine.inputs}
    why = ("requests of the model are not batched" if not (config.batched and engine.max_batch) or is_mixed(engine) else
           f"its items depend on each other ({engine.dependence})" if engine.dependence else
           f"it needs one open extent in every input, and the model has {', '.join(sorted(names)) or 'none'}"
           if len(names) != 1 or any(len(positions) != 1 for positions in axes.values()) else
           "an input or output is reshaped" if any(spec.reshape for spec in (*config.inputs, *config.outputs)) else
           "requests of sequences are not padded" if config.sequences else "")
    if why:
        raise ModelConfigError(f"parameter ragged: {why}; remove it")
    inputs = {name: axis for name, (axis,) in axes.items()}
    buckets = tuple(extent for extent in _extents(config.build.buckets) if _takes(engine, inputs, extent))
    if not buckets:
        raise ModelConfigError(f"parameter buckets: the model takes none of {config.build.buckets or 'the defaults'}")
    return Padding(inputs, _Trial(engine, context, inputs).outputs(buckets), buckets,
                   _LARGEST if config.build.buckets else _MAX_BUCKETED)


def _extents(text: str) -> list[int]:
    """Return the buckets of a configuration, by default 8, 10, 12, 14, 16, 20, ...: at most a fifth is padding."""
    if not text:
        return sorted(size << power for power in range(1, _LARGEST.bit_length() - 3) for size in (4, 5, 6, 7))
    try:
        extents = sorted({int(word) for word in text.split(",")})
    except ValueError:
        extents = [0]
    if extents[0] < 1:
        raise ModelConfigError(f"parameter buckets: expected positive numbers separated by commas, got '{text}'")
    return extents


def _shapes(engine: Engine, inputs: Mapping[str, int], items: int, extent: int) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tuple(items if size == BATCH else extent if axis == inputs[tensor.name] else int(size)
                               for axis, size in enumerate(tensor.shape)) for tensor in engine.inputs}


def _takes(engine: Engine, inputs: Mapping[str, int], extent: int) -> bool:
    with suppress(InputError):
        engine.check(_shapes(engine, inputs, 1, extent))
        return True
    return False


class _Trial:
    """Comparison of an item executed alone with the same item padded, in a batch with a longer one."""

    def __init__(self, engine: Engine, context: ExecutionContext, inputs: Mapping[str, int]) -> None:
        self._engine, self._context, self._inputs = engine, context, inputs
        self._close = _CLOSE if precision_of(engine) == "fp32" else _ROUNDED
        self._random = np.random.default_rng(0)

    def outputs(self, buckets: Sequence[int]) -> dict[str, int]:
        """Return the padded axis of each output that has one. Raises ModelConfigError if other elements differ."""
        extent = next((bucket for bucket in buckets if bucket >= _TRIED), buckets[-1])
        short = next((n for n in (extent * 3 // 4, extent - 1, *range(extent - 1, 0, -1))
                      if n and _takes(self._engine, self._inputs, n)), 0)
        if not short:
            raise ModelConfigError(f"parameter ragged: the model takes no extent below {extent}; remove it")
        try:
            one, other = self._drawn(short), self._drawn(extent)
            alone, both = self._run([one], short), self._run([one, other], extent)
        except EngineError as error:
            raise ModelConfigError(f"parameter ragged: the model cannot be tried: {error}") from error
        output_axes = {}
        for name, expected in alone.items():
            padded = both[name][:1]
            axes = [axis for axis, sizes in enumerate(zip(expected.shape, padded.shape, strict=True))
                    if sizes == (short, extent)]
            if len(axes) > 1 or padded.ndim != expected.ndim or any(
                    a != b for axis, (a, b) in enumerate(zip(expected.shape, padded.shape, strict=True))
                    if axis not in axes):
                raise ModelConfigError(f"parameter ragged: output '{name}' of shape {list(expected.shape)} cannot be "
                                       f"cut out of {list(padded.shape)}; remove it")
            if axes:
                output_axes[name] = axes[0]
                padded = padded[(slice(None),) * axes[0] + (slice(short),)]
            self._compare(name, padded, expected)
        return output_axes

    def _compare(self, name: str, padded: NDArray[Any], expected: NDArray[Any]) -> None:
        difference = np.max(np.abs(padded.astype(np.float64) - expected), initial=0)
        if not difference <= self._close * np.max(np.abs(expected.astype(np.float64)), initial=0):
            raise ModelConfigError(f"parameter ragged: the model does not ignore padding by zeros: output '{name}' "
                                   f"changes by {difference:.3g}; remove it")

    def _drawn(self, extent: int) -> dict[str, NDArray[Any]]:
        """Return one random item; integers, which may be indices or masks, are 1."""
        feed = {}
        for name, shape in _shapes(self._engine, self._inputs, 1, extent).items():
            dtype = self._context.at(self._usual(1, extent)).input(name, 1).dtype
            feed[name] = self._random.standard_normal(shape).astype(dtype) if dtype.kind == "f" else np.ones(
                shape, dtype)
        return feed

    def _usual(self, items: int, extent: int) -> dict[str, tuple[int, ...]]:
        return _shapes(self._engine, self._inputs, items, extent)

    def _run(self, items: Sequence[Mapping[str, NDArray[Any]]], extent: int) -> dict[str, NDArray[Any]]:
        context = self._context.at(self._usual(len(items), extent))
        for name, axis in self._inputs.items():
            slots = context.input(name, len(items))
            for index, item in enumerate(items):
                _copy_padded(slots[index:index + 1], item[name], axis)
        context.execute(len(items))
        return {tensor.name: context.output(tensor.name, len(items)).copy() for tensor in self._engine.outputs}


class PaddedExecutor(EngineExecutor):
    """Executor of batches whose requests differ in one padded extent: they are padded to the longest of them."""

    def __init__(self, padding: Padding, context: ExecutionContext, outputs: Sequence[str], max_batch: int,
                 gpu: int | None = None) -> None:
        super().__init__(context, outputs, max_batch, is_open=True, gpu=gpu)
        self._padding = padding

    def _shapes(self, batch: Sequence[Request], items: int) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for name, axis in self._padding.inputs.items():
            shape = batch[0].inputs[name].shape
            extent = self._padding.extent(max([request.inputs[name].shape[axis] for request in batch]))
            shapes[name] = (items or 1, *shape[1:axis], extent, *shape[axis + 1:])
        return shapes

    def _gather(self, context: ExecutionContext, batch: list[Request], items: int) -> dict[str, list[Any]]:
        for name, axis in self._padding.inputs.items():
            slots, first = context.input(name, items), 0
            for request in batch:
                tensor = request.inputs[name]
                array = tensor if isinstance(tensor, np.ndarray) else tensor.array()
                _copy_padded(slots[first:first + request.items], array, axis)
                first += request.items
        return {}

    def _scatter(self, context: ExecutionContext, batch: list[Request], items: int,
                 there: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        cut = self._padding.outputs
        if not any(name in cut for name in self._outputs):
            return super()._scatter(context, batch, items, there)
        source, source_axis = next(iter(self._padding.inputs.items()))
        outcomes: list[Outcome] = []
        first = 0
        for request in batch:
            end, extent = first + request.items, request.inputs[source].shape[source_axis]
            outputs = {name: context.output(name, items)[first:end] for name in self._outputs}
            for name, axis in cut.items():
                if name in outputs:
                    outputs[name] = np.ascontiguousarray(outputs[name][(slice(None),) * axis + (slice(extent),)])
            outcomes.append((request, request.encode(outputs)))
            first = end
        return outcomes


def _copy_padded(slots: NDArray[Any], array: NDArray[Any], axis: int) -> None:
    """Copy an array into slots that are longer along an axis, and zeros behind it."""
    before, extent = (slice(None),) * axis, array.shape[axis]
    copy_into(slots[(*before, slice(extent))], array)
    slots[(*before, slice(extent, None))] = np.zeros((), slots.dtype)
