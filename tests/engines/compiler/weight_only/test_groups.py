"""Rounding of weights in groups."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.engines.frontend.weight_only import groups as module
from infer_server.engines.frontend.weight_only.groups import LIMITS, nearest
from tests.engines.compiler.weight_only.models import normal


@pytest.mark.parametrize("bits, group", [(4, 32), (4, 64), (8, 100)])
def test_weights_are_within_half_a_step_of_their_integers_unless_they_are_clipped(bits: int, group: int) -> None:
    rows = normal(9, 100)
    found = nearest(rows, bits, group)
    assert found.numbers.dtype == np.int8 and found.scales.shape == (9, -(-100 // group))
    low, high = LIMITS[bits]
    assert low <= found.numbers.min() and found.numbers.max() <= high
    steps = np.repeat(found.scales, group, axis=1)[:, :100]
    inside = (found.numbers > low) & (found.numbers < high)
    assert (np.abs(found.real() - rows)[inside] <= steps[inside] * 0.5001).all()


def test_a_searched_scale_has_a_lower_error_than_one_that_clips_nothing() -> None:
    rows = normal(50, 128)
    largest = np.abs(rows.reshape(50, 4, 32)).max(-1)
    plain = np.rint(rows.reshape(50, 4, 32) / largest[..., None] * 7) * largest[..., None] / 7
    error = np.square(nearest(rows, 4, 32).real() - rows).mean()
    assert error < 0.85 * np.square(plain.reshape(50, 128) - rows).mean()


def test_important_columns_have_lower_errors() -> None:
    rows, importance = normal(64, 32), np.where(np.arange(32) < 4, 100.0, 1.0)
    plain, weighted = (np.square(nearest(rows, 4, 32, some).real() - rows)[:, :4].mean() for some in (None, importance))
    assert weighted < 0.8 * plain


@pytest.mark.parametrize("bits", [4, 8])
def test_constant_and_zero_groups_are_exact(bits: int) -> None:
    rows = np.zeros((3, 96), np.float32)
    rows[1], rows[2, 32:64], rows[2, 70] = 0.3, -0.7, 1e-40
    found = nearest(rows, bits, 32)
    np.testing.assert_allclose(found.real(), rows, 1e-6, 1e-30)
    assert not found.numbers[0].any() and np.isfinite(found.scales).all()


def test_a_group_may_be_larger_than_a_channel() -> None:
    rows = normal(5, 20)
    found = nearest(rows, 4, 128)
    assert found.scales.shape == (5, 1)
    np.testing.assert_array_equal(found.real(), nearest(rows, 4, 20).real())


def test_channels_are_rounded_alike_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = normal(33, 70)
    whole = nearest(rows, 4, 32)
    monkeypatch.setattr(module, "PART", 210)
    np.testing.assert_array_equal(nearest(rows, 4, 32).real(), whole.real())
