"""Faults of the matrix-unit kernel that the comparison with the reference, or a CPU, notices."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX512_AMX, AVX512_VNNI, Isa
from infer_server.engines.backends.llvm.codegen.tiles import AMX, Shapes
from infer_server.engines.backends.llvm.kernels.matrix_unit.contraction import AmxTile, MatrixUnitContraction
from infer_server.engines.backends.llvm.kernels.matrix_unit.loops import _TileProducts
from infer_server.engines.backends.llvm.kernels.matrix_unit.pending import Pending
from infer_server.engines.backends.llvm.kernels.matrix_unit.registers import Registers
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import PTR
from infer_server.engines.lowering.problems.problem import Array
from tests.engines.backends.llvm.jit import runs_here
from tests.engines.backends.llvm.tiles.jobs import kernel_job, output_of
from tests.engines.backends.llvm.tiles.machine import TileError
from tests.engines.backends.test_contraction import Shape, problem

pytestmark = pytest.mark.skipif(not runs_here(AVX512_VNNI), reason="instructions other than tiles need AVX-512 VNNI")
TAIL = Shape(1, 37, 65, 64), AmxTile(1, 32, 2)      # 5 pixels in another configuration, 1 byte of K in another block
SHAPES, CONFIGURED = Registers.shapes, _TileProducts.configured


def outputs(shape: Shape, tactic: AmxTile, folder: Path, isa: Isa = AVX512_AMX,
            packed: Sequence[Array] | None = None) -> tuple[Array, Array]:
    """Return the kernel's output and the reference."""
    spec, inputs, constants = problem(shape, "int8")
    kernel = MatrixUnitContraction(spec)
    job = kernel_job(kernel, isa, tactic, inputs, constants, packed)
    return output_of(kernel, job, len(inputs[0]), folder), spec.reference(inputs, constants)[0]


def assert_differs(*arguments: Any, **options: Any) -> None:
    got, expected = outputs(*arguments, **options)
    assert (got != expected).mean() > 0.005


def test_without_a_fault_the_reference_is_met(tmp_path: Path) -> None:
    np.testing.assert_array_equal(*outputs(*TAIL, tmp_path))


def with_rows(monkeypatch: pytest.MonkeyPatch, *registers: str) -> None:
    """Configure a row less for the first accumulators (c) or the first pixels (a)."""
    def shapes(self: Registers) -> Shapes:
        found = dict(SHAPES.fget(self))         # type: ignore[attr-defined]
        of = {"a": [self.a(0)], "c": [self.c(0, v) for v in range(self.vectors)]}
        for register in (register for name in registers for register in of[name]):
            found[register] = max(found[register][0] - 1, 1), found[register][1]
        return found
    monkeypatch.setattr(Registers, "shapes", property(shapes))


def test_a_row_that_is_missing_in_pixels_and_accumulators_is_noticed(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    with_rows(monkeypatch, "a", "c")
    assert_differs(*TAIL, tmp_path)


@pytest.mark.parametrize("register", ["a", "c"])
def test_rows_of_pixels_and_accumulators_that_differ_are_refused(register: str, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    with_rows(monkeypatch, register)
    with pytest.raises(TileError, match="#UD: tdpbusd"):
        outputs(*TAIL, tmp_path)


def test_a_configuration_that_is_not_put_back_after_a_tail_is_noticed(tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(self: _TileProducts, pending: Pending) -> None:
        """Configure tiles of whole registers before the first one only."""
        if self.registers.rows[0] < AMX.rows:
            CONFIGURED(self, pending)
            return
        with self.f.when(pending.configuration.compare("eq", Value(self.f, PTR, "null"))):
            CONFIGURED(self, pending)
    monkeypatch.setattr(_TileProducts, "configured", kept)
    with pytest.raises(TileError, match="#UD: tile"):       # the tail's tiles are fewer
        outputs(*TAIL, tmp_path)
    shape, tactic = TAIL
    assert_differs(replace(shape, cols=32 + 20), tactic, tmp_path)      # as many, of 10 rows


def test_weights_that_are_not_zero_where_blocks_of_k_overlap_are_noticed(tmp_path: Path) -> None:
    shape, tactic = TAIL
    spec, _, constants = problem(shape, "int8")
    kernel = MatrixUnitContraction(spec)
    weights, *others = (array.copy() for array in kernel.expanded_constants(AVX512_AMX, tactic, constants))
    assert kernel.block_starts == [0, 4] and kernel.depth == 64
    panel = weights[:2 * 2 * 16 * 64].reshape(2, 2, 16, 64)     # [block][vector][quad][lane and byte]
    assert not panel[1, :, 0].any() and panel[1, :, 15].any()
    np.testing.assert_array_equal(*outputs(*TAIL, tmp_path, packed=[weights, *others]))
    panel[1, :, 0] = 1
    assert_differs(*TAIL, tmp_path, packed=[weights, *others])


def test_weights_that_are_read_without_a_sign_are_noticed(tmp_path: Path) -> None:
    unsigned = replace(AVX512_AMX, matrix=replace(AMX, products=(("int8", "tdpbuud"),)))
    assert_differs(*TAIL, tmp_path, isa=unsigned)


def test_a_pixel_pitch_without_the_stride_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _TileProducts.__init__

    def unstrided(self: _TileProducts, *arguments: Any) -> None:
        made(self, *arguments)
        self.x_pitch = self.loops.problem.x.strides[1]
    strided = Shape(3, 14, 64, 32, taps=(3, 3), stride=(2, 2)), AmxTile(1, 14, 2)
    np.testing.assert_array_equal(*outputs(*strided, tmp_path))
    monkeypatch.setattr(_TileProducts, "__init__", unstrided)
    assert_differs(*strided, tmp_path)
