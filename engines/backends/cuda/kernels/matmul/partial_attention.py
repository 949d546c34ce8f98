"""Attention with few queries as several problems, each over a slice of the keys, and their combination.

    AttentionPeaks      m[s, g] = max over the g-th slice of t of x[s, t]                       INT8 only
    AttentionSums       l[s, g] = sum over these t of p[s, t];    a[s, g] = sum of p[s, t] * v[t]
                        p[s, t] = 2**(x[s, t] - m[s, g]), m a further result; in INT8 m is the global maximum, p rounded
    JoinedAttention     y[s] = program(sum over g of r[s, g] * a[s, g] / sum over g of r[s, g] * l[s, g])
                        r[s, g] = 2**(m[s, g] - max of m); in INT8 1

INT8 sums are int32 and thus equal the unsplit ones; floats are added in another order.

References
----------
Dao et al., "Flash-Decoding for long-context inference", 2023.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.engines.lowering.epilogue.program import NUMPY, EpilogueProgram, Floats, load_meaning, store_meaning
from infer_server.engines.lowering.problems.exp2 import exp2
from infer_server.engines.lowering.problems.matmul import MIDDLE, Attention
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.rows import less_peak, reduced_rows, share_of
from infer_server.engines.lowering.problems.view import FLOATS, View, dense_view


@dataclass(frozen=True)
class _OfParts(Problem):
    """Part of the attention `whole`, whose keys are divided into `parts` slices. Intermediate results are dense."""
    whole: Attention
    parts: int
    computes_on = (*FLOATS, "int32")

    @property
    def integers(self) -> bool:
        return self.whole.precision == "int8"

    @property
    def keys(self) -> int:
        """Keys per slice; the last may have fewer."""
        return -(-self.whole.keys // self.parts)

    @property
    def peaks(self) -> View:
        return dense_view("float32", (*self.whole.y.shape[:-1], self.parts))

    @property
    def totals(self) -> View:
        return dense_view("int32" if self.integers else "float32", self.peaks.shape)

    @property
    def sums(self) -> View:
        """View of the sums, [..., S, slice, E]."""
        return dense_view(self.totals.dtype, (*self.peaks.shape, self.whole.y.shape[-1]))

    def of_parts(self, x: Array, axis: int = -1) -> list[Array]:
        """Split an axis of keys into slices."""
        return np.split(x, range(self.keys, self.whole.keys, self.keys), axis)


@dataclass(frozen=True)
class AttentionPeaks(_OfParts):
    """Maximum score of each slice."""
    family = "attention_peaks"
    writes = ("peaks",)

    @property
    def inputs(self) -> tuple[View, ...]:
        return self.whole.inputs

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x = self.whole.scores(inputs, constants)
        return (np.concatenate([reduced_rows("max", part) for part in self.of_parts(x)], -1),)


@dataclass(frozen=True)
class AttentionSums(_OfParts):
    """Sums of p and of p * v of each slice."""
    family = "attention_sums"

    @property
    def inputs(self) -> tuple[View, ...]:
        return (*self.whole.inputs, *[self.peaks] * self.integers)

    @property
    def outputs(self) -> tuple[View, ...]:
        return (self.sums, self.totals, *[self.peaks] * (not self.integers))

    @property
    def macs(self) -> int:
        return self.whole.macs

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        whole, x = self.whole, self.whole.scores(inputs, constants)
        v = load_meaning(whole.v.dtype, inputs[2])
        v = v - np.float32(MIDDLE if self.integers else constants["numbers"][3])
        found = [self._sums(part, of_v, reduced_rows("max", inputs[-1] if self.integers else part))
                 for part, of_v in zip(self.of_parts(x), self.of_parts(v, -2), strict=True)]
        sums, totals, peaks = zip(*found, strict=True)
        results = np.stack(sums, -2), np.concatenate(totals, -1), np.concatenate(peaks, -1)
        return (results[0].astype(self.sums.dtype), results[1].astype(self.totals.dtype),
                *[results[2]] * (not self.integers))

    def _sums(self, x: Floats, v: Floats, peak: Floats) -> tuple[Array, Array, Array]:
        p = exp2(NUMPY, less_peak(x, peak) * self.whole.units, "uint8" if self.integers else "float32")
        p = np.rint(p).astype(np.float64) if self.integers else p
        return np.matmul(p, v), p.sum(-1, keepdims=True), peak


@dataclass(frozen=True)
class JoinedAttention(_OfParts):
    """Combination of the slices' sums, normalisation and epilogue."""
    family = "joined_attention"
    reads = ("sums", "totals", "peaks")

    @property
    def y(self) -> View:
        return self.whole.y

    @property
    def program(self) -> EpilogueProgram:
        return self.whole.program

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        (sums, totals, peaks), whole = inputs, self.whole
        peak = reduced_rows("max", peaks)
        part = 1 if self.integers else exp2(NUMPY, less_peak(peaks, peak) * whole.units, "float32")[..., None]
        total = (totals[..., None] * part).sum(-2).astype(np.float32)
        mean = (sums * part).sum(-2).astype(np.float32) * share_of(peak, total)
        if self.integers and whole.mask:
            mean = mean + np.where(peak > -np.inf, np.float32(0), np.float32(constants["numbers"][3] - MIDDLE))
        return (store_meaning(self.y.dtype, self.program.meaning(mean, [], constants["program"])),)
