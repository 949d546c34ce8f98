"""Padded positions of token sequences, which have no meaning and do not count in calibration.

A sentence encoder's attention_mask is 0 where a sequence is padded to the length of its batch. No other position
depends on these, and nobody reads what the model computes there: they neither widen ranges nor count as errors.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from infer_server.engines.ir.graph import Array

MASK = "attention_mask"     # name of the input, as exporters of transformers write it


class Padding:
    """Padded positions of a feed."""

    def __init__(self, feed: Mapping[str, Array]) -> None:
        mask = np.asarray(feed[MASK]) if MASK in feed else np.ones((1, 1))
        known = mask.ndim == 2 and mask.dtype.kind in "biuf" and bool(((mask == 0) | (mask == 1)).all())
        self._mask = mask != 0 if known and not mask.all() and mask.any() else None

    @property
    def count(self) -> int:
        """Number of padded positions."""
        return 0 if self._mask is None else int(self._mask.size - np.count_nonzero(self._mask))

    def without(self, values: Array) -> Array:
        """Return the rows [rows, ...] of a tensor that are not padded; all of a tensor of other axes."""
        mask = self._of(values)
        return values if mask is None else values[mask]

    def zeroed(self, values: Array) -> Array:
        """Return a tensor with zeros at padded positions; one of other axes as it is."""
        mask = self._of(values)
        if mask is None:
            return values
        return np.where(mask.reshape(*mask.shape, *[1] * (values.ndim - mask.ndim)), values, values.dtype.type(0))

    def by_item(self, values: Array, items: int) -> Iterator[Array]:
        """Yield what `without` leaves of each of so many items; a tensor without an axis of items is one."""
        count = items if values.ndim and len(values) % items == 0 else 1
        mask = self._of(values)
        for number, item in enumerate(values.reshape(count, -1, *values.shape[1:])):
            if mask is not None:
                item = item.reshape(-1, *values.shape[mask.ndim:])[mask.reshape(count, -1)[number]]
            yield item

    def _of(self, values: Array) -> Array | None:
        """Return the mask in the axes of a tensor [N, T, ...] or [N * T, ...], True where it is not padded, or None.

        Tensors of more axes are attention scores, whose second axis is one of heads.
        """
        if self._mask is None or not 2 <= values.ndim <= 3:
            return None
        mask: Array = self._mask
        if values.shape[:2] == mask.shape:
            return mask
        return mask.reshape(-1) if len(values) == mask.size else None
