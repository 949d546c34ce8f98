"""Division of a tensor into parts whose accuracy is measured separately, such as boxes in pixels and scores below 1.

A single signal to noise ratio would describe the boxes only, even if every score became 0. The parts are the sources of
a Concat if the graph shows them (infer_server.calibration.accuracy.sources), otherwise groups of channels of different
magnitude. Parts of similar magnitude are joined, because the loss of one shows in their common ratio.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infer_server.calibration.accuracy.sources import Sources
from infer_server.engines.ir.graph import Array

ALIKE = 4.0             # sources whose peaks and root mean squares differ by at most this factor are one part
GAP = 8.0               # channels fall into groups where these jump by this factor
MOST_CHANNELS = 4096
LEAST_SHARE = 0.01      # least share of the channels in a group: a single dead channel is no group
OTHER = -1              # label of elements that are judged with no part: constants


@dataclass(frozen=True)
class TensorParts:
    """Parts of a tensor.

    names       names of the parts; "" for a tensor that is one part
    labels      for each run: index of each element's part, broadcastable to the tensor's shape
    """
    names: tuple[str, ...] = ("",)
    labels: tuple[Array, ...] = ()

    def masks(self, run: int, shape: Sequence[int]) -> Iterator[tuple[str, NDArray[np.bool_] | None]]:
        """Yield each part's name and elements in the tensor that a run gave; None for all of them."""
        if len(self.names) == 1 or run >= len(self.labels):
            yield "", None
            return
        labels = np.broadcast_to(self.labels[run], shape)
        for number, name in enumerate(self.names):
            yield name, labels == number


@dataclass(frozen=True)
class _Size:
    """Largest magnitude and root mean square of some values."""
    peak: float
    rms: float

    def is_like(self, other: _Size, factor: float) -> bool:
        return all(max(a, b) <= factor * min(a, b) for a, b in ((self.peak, other.peak), (self.rms, other.rms)))


def parts_of_tensor(arrays: Sequence[Array], sources: Sequence[Sources]) -> TensorParts:
    """Divide a tensor into parts.

    Parameters
    ----------
    arrays : float arrays
        The tensor's right values in each run of the model.
    sources : for each run
        The sources of its elements, for the shape that it has in that run.

    Returns
    -------
    TensorParts
        One part where nothing in the tensor is unlike the rest, or where shapes do not fit.
    """
    if not arrays or not all(_fits(one.labels, array) for one, array in zip(sources, arrays, strict=True)):
        return TensorParts()
    names = tuple(dict.fromkeys(name for one in sources for name in one.names))
    if len(names) > 1:
        return _of_sources(names, arrays, sources)
    return TensorParts() if sources[0].bounded else _of_channels(arrays)


def _fits(labels: Array, array: Array) -> bool:
    return labels.ndim == array.ndim and all(a in (1, b) for a, b in zip(labels.shape, array.shape, strict=True))


def _size(values: Sequence[Array]) -> _Size:
    finite = np.concatenate([part[np.isfinite(part)].astype(np.float64) for part in values])
    return _Size(float(np.abs(finite).max()), float(np.sqrt((finite ** 2).mean()))) if finite.size else _Size(0.0, 0.0)


# ---- as the graph shows them
def _of_sources(names: Sequence[str], arrays: Sequence[Array], sources: Sequence[Sources]) -> TensorParts:
    labels = [_renumbered(one, names) for one in sources]
    sizes = {number: _size([array[np.broadcast_to(label, array.shape) == number]
                            for array, label in zip(arrays, labels, strict=True)]) for number in range(len(names))}
    groups: list[list[int]] = []
    for number in sorted((n for n in sizes if sizes[n].peak), key=lambda n: -sizes[n].rms):
        group = next((g for g in groups if sizes[g[0]].is_like(sizes[number], ALIKE)), None)
        if group is None:
            groups.append(group := [])
        group.append(number)
    if len(groups) < 2:
        return TensorParts()
    part = np.full(len(names) + 1, OTHER, np.int32)     # the last is that of constants, whose label is OTHER
    for index, group in enumerate(groups):
        part[group] = index
    return TensorParts(tuple(_joined([names[n] for n in sorted(group)]) for group in groups),
                       tuple(part[label] for label in labels))


def _renumbered(sources: Sources, names: Sequence[str]) -> Array:
    """Map labels to indices into `names`."""
    return np.array([*map(names.index, sources.names), OTHER], np.int32)[sources.labels]


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


# ---- as their values show them
def _of_channels(arrays: Sequence[Array]) -> TensorParts:
    """Divide along the second axis or the last one, whichever has more groups of channels."""
    rank = arrays[0].ndim
    divisions = [_along(axis, arrays) for axis in dict.fromkeys((1, rank - 1)) if 0 < axis < rank]
    return max(divisions, key=lambda parts: len(parts.names), default=TensorParts())


def _along(axis: int, arrays: Sequence[Array]) -> TensorParts:
    extents = {array.shape[axis] for array in arrays}
    if len(extents) > 1 or not 2 <= (extent := extents.pop()) <= MOST_CHANNELS:
        return TensorParts()
    peaks, rms = _by_channel(axis, arrays)
    order = np.argsort(rms, kind="stable")
    order = order[rms[order] > 0]
    cuts = [i for i in range(1, len(order)) if rms[order[i]] >= GAP * rms[order[i - 1]]
            and peaks[order[i:]].min() >= GAP * peaks[order[:i]].max()]
    groups = np.split(order, cuts)
    if len(groups) < 2 or min(map(len, groups)) < LEAST_SHARE * extent:
        return TensorParts()
    labels = np.full(extent, len(groups) - 1, np.int32)     # channels of zeros count with the smallest
    for number, group in enumerate(reversed(groups)):
        labels[group] = number
    shape = [extent if i == axis else 1 for i in range(arrays[0].ndim)]
    before = ":, " * axis
    return TensorParts(tuple(f"[{before}{_text(group)}]" for group in reversed(groups)),
                       (labels.reshape(shape),) * len(arrays))


def _by_channel(axis: int, arrays: Sequence[Array]) -> tuple[Array, Array]:
    """Measure the peak and the root mean square of each index of an axis."""
    peaks, squares, count = 0.0, 0.0, 0
    for array in arrays:
        rows = np.moveaxis(np.where(np.isfinite(array), array, 0), axis, 0).reshape(array.shape[axis], -1)
        if rows.shape[1]:
            peaks = np.maximum(peaks, np.abs(rows).max(axis=1))
        squares = squares + (rows.astype(np.float64) ** 2).sum(axis=1)
        count += rows.shape[1]
    rms = np.sqrt(np.asarray(squares) / max(count, 1))
    return np.broadcast_to(np.asarray(peaks), rms.shape), rms


def _text(channels: Array) -> str:
    """Write indices as a slice, or as a list of the first ones."""
    first, last = int(channels.min()), int(channels.max())
    if last - first + 1 == len(channels):
        return f"{first}:{last + 1}" if last > first else f"{first}"
    return ",".join(map(str, sorted(channels)[:4])) + (",..." if len(channels) > 4 else "")


# ---- of all tensors
def parts_by_tensor(runs: Sequence[Mapping[str, Array]],
                    sources: Sequence[Mapping[str, Sources]]) -> dict[str, TensorParts]:
    """Divide every floating-point tensor that each run gave. sources: for each run, by tensor."""
    names = [name for name, array in runs[0].items() if array.dtype.kind == "f"] if runs else []
    return {name: parts_of_tensor([run[name] for run in runs], [one[name] for one in sources])
            for name in names if all(name in one for one in sources)}
