"""The places of paired weights (pairing.py), of which a plan keeps half as many bytes as the kernels read.

    kept    uint32 [step]       16 bits of an offset, then 4 bits for each of the picks
    made    int32 [step][2]     an offset; a byte for each of the picks
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import I32, I64, Module, vector
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, KernelSpec, Tactic, begin_kernel
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import View, dense_view
from engines.plan.packed import PICKS, spread_places

STEPS = ALIGNMENT // 4
FAR = 1 << 16           # offsets from here on do not fit


def shorten_places(places: Array) -> Array:
    """int32 [step][2], offsets below FAR and picks below 16 -> uint32 [step]."""
    picks = np.ascontiguousarray(places[:, 1]).view(np.uint8).reshape(-1, PICKS).astype(np.uint32)
    shifts = 16 + 4 * np.arange(PICKS, dtype=np.uint32)
    words: Array = places[:, 0].astype(np.uint32) | np.bitwise_or.reduce(picks << shifts, axis=1)
    return words


@dataclass(frozen=True)
class PairOffsets(KernelSpec):
    """An item is as many steps as packed constants are multiples of: so one kernel serves all layers."""
    family = "places"

    @property
    def inputs(self) -> tuple[View, ...]:
        return (dense_view("uint32", (STEPS,)),)

    @property
    def outputs(self) -> tuple[View, ...]:
        return (dense_view("int32", (STEPS, 2)),)

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(1)

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, (kept, made), (begin, end, *_) = begin_kernel(module, name, 2)
        count = isa.bytes // 8
        for item in f.range("item", begin, end):
            for at in range(0, STEPS, count):
                here = (item * STEPS + at) * 4
                loaded = f.load(vector(count, I32), kept + here, 4, "words")
                words = f.cast("zext", loaded, vector(count, I64), "words")
                pair = words.binary("and", FAR - 1)
                for pick in range(PICKS):
                    bits = words.binary("lshr", 16 + 4 * pick).binary("and", 15)
                    pair = pair.binary("or", bits.binary("shl", 32 + 8 * pick))
                f.store(pair, made + here * 2, isa.bytes)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        offsets, picks = spread_places(inputs[0].reshape(-1))
        pairs = np.stack([offsets, picks.view(np.int32)[:, 0]], -1)
        return (pairs.reshape(len(inputs[0]), STEPS, 2),)
