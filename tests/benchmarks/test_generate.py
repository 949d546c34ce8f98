"""Test of benchmarks.measure.generate: a small decoder beside ONNX Runtime."""
from __future__ import annotations

import sys

import numpy as np
import pytest

from benchmarks.measure import generate
from benchmarks.measure.decoders import BLOCK, four_bits


def test_a_decoder_generates_what_onnx_runtime_does(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--layers 1 --hidden 64 --heads 4 --shared-heads 2 --inner 96 --words 50 --prompt 5 --tokens 6"
    monkeypatch.setattr(sys, "argv", ["generate", *sizes.split()])
    generate.main()
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if " bits |" in line]
    assert [row[1].strip() for row in rows] == ["32 bits", "4 bits"]
    assert float(rows[0][7]) < 1e-4 and float(rows[1][7]) < 0.1


def test_four_bits_are_within_half_a_step_of_the_weights() -> None:
    weight = np.random.default_rng(0).standard_normal((2 * BLOCK, 3), dtype=np.float32)
    packed, scales = four_bits(weight)
    numbers = np.stack((packed & 15, packed >> 4), -1).reshape(3, 2, BLOCK).astype(np.float32) - 8
    restored = (numbers * scales.reshape(3, 2, 1)).reshape(3, -1).T
    assert np.abs(restored - weight).max() <= 0.5001 * scales.max()
