"""Recurrent cells equal their reference on every machine, bit for bit for integer products."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX2, AVX512_VNNI, PORTABLE
from infer_server.engines.backends.llvm.kernels.recurrent import tiling
from infer_server.engines.backends.llvm.kernels.recurrent.tiling import Panels, fits
from infer_server.engines.lowering.problems.recurrence import (
    QUANTIZED_STATES,
    crowded_units,
    integer_precision,
    integer_weights,
)
from infer_server.engines.lowering.rules.cells import bounded
from infer_server.engines.ops.recurrent import Recurrence as Operator
from scripts.testing.recurrence import STEPS, Case, node_of
from scripts.testing.suite import check, run
from tests.engines.backends.llvm.runner import CpuRunner, kernel_of
from tests.engines.backends.runners import (
    ALL_COMBINATIONS,
    EVERY_BACKEND,
    EVERY_ISA_WIDTH,
    EVERY_WIDTH,
    ISA_WIDTHS,
    WIDTHS,
    by_name,
    rotated,
)

FLOAT_SUMS = 2e-5       # float32 sums in another order, fed back for some steps


CELLS: dict[str, dict[str, Any]] = {
    "lstm": {},
    "lstm with coupled gates and clip": {"input_forget": 1, "clip": 0.7},
    "lstm of relu": {"activations": ("HardSigmoid", "Softsign", "Relu"), "activation_alpha": (0.2, 0.0, 0.0) * 2,
                     "activation_beta": (0.5, 0.0, 0.0) * 2},
    "gru": {"cell": "GRU"},
    "gru, product reset": {"cell": "GRU", "linear_before_reset": 1},
    "rnn": {"cell": "RNN"},
    "rnn of a steep tanh": {"cell": "RNN", "activations": ("ScaledTanh",), "activation_alpha": (0.9,) * 2,
                            "activation_beta": (1.5,) * 2},
    "rnn of elu": {"cell": "RNN", "activations": ("Elu",), "activation_alpha": (0.7,) * 2},
}
BOTH_WHOLE = pytest.mark.parametrize("precision", ["int16", "int8"])
REFINED = (Panels(1, prefetch=True), Panels(2, places=2, alternate=True), Panels(1, places=4, prefetch=True),
           Panels(3, places=4), Panels(1, alternate=True))
EVERY_CELL = pytest.mark.parametrize("attrs", CELLS.values(), ids=CELLS)


@rotated("runner, attrs, hidden", by_name(WIDTHS), CELLS, {"1": 1, "5": 5, "24": 24})
def test_a_cell_equals_its_reference(attrs, hidden, runner):
    case = Case(node_of(direction="bidirectional", **attrs), hidden)
    check(case.spec, runner, case.inputs, case.constants, FLOAT_SUMS, pieces=2)


@EVERY_BACKEND
@BOTH_WHOLE
@pytest.mark.parametrize("attrs", [{}, {"cell": "GRU"}, {"cell": "GRU", "linear_before_reset": 1}, {"cell": "RNN"}],
                         ids=["lstm", "gru", "gru, product reset", "rnn"])
def test_whole_products_are_exact(attrs, precision, runner):
    case = Case(node_of(direction="bidirectional", **attrs), 37, precision, batch=11)
    check(case.spec, runner, case.inputs, case.constants, pieces=2)


@EVERY_BACKEND
@pytest.mark.parametrize("attrs", [{}, {"activations": ("Relu", "Softsign", "Relu")}], ids=["lstm", "of relu"])
def test_a_state_that_is_rounded_by_its_own_range_is_multiplied_exactly(attrs, runner):
    """States after Relu exceed 1 and are never negative; initial states are rounded like others."""
    case = Case(node_of(direction="bidirectional", **attrs), 37, "int8", batch=11, states=True, rounds=True)
    check(case.spec, runner, case.inputs, case.constants, pieces=2)
    zeros = Case(node_of(), 5, "int8", rounds=True, lengths=True)
    check(zeros.spec, runner, zeros.inputs, zeros.constants)


@EVERY_BACKEND
@pytest.mark.parametrize("hidden, large, crowded", [(37, [0, 1, 22, 23, 35], [1, 23, 35]), (40, [], [])])
def test_a_rounded_state_of_bytes_is_multiplied_exactly_whatever_its_neighbours_weights(hidden, large, crowded, runner):
    """Weights include neighbours that add up to more than 128, of either sign, and none."""
    case = Case(node_of(direction="bidirectional"), hidden, "int8", batch=9, states=True, rounds=True)
    weights = np.clip(case.constants["weights"], -64, 64)
    weights[:, :, large], weights[:, ::3, large] = -128, 127
    assert list(crowded_units(weights)) == crowded
    case.inputs[1] = np.abs(case.inputs[1]) * 9     # states of one sign: bytes up to 255
    spec = replace(case.spec, crowded=len(crowded))
    check(spec, runner, case.inputs, {**case.constants, "weights": weights}, pieces=2)


@EVERY_BACKEND
def test_products_of_the_largest_states_and_weights_are_exact(runner):
    case = Case(node_of("RNN"), 40, "int8", batch=1, steps=2)
    signs = np.where(np.arange(40) % 2, 1, -1)
    case.constants |= {"weights": np.asarray(127 * np.outer(signs, signs), np.int8)[None],
                       "scales": np.full((1, 40), 1 / (40 * 127 * 127), np.float32)}
    case.inputs[0][0] = 20 * signs, -0.8 * signs        # the first state is 1 or -1, the second's gates 0.2 or -0.2
    check(case.spec, runner, case.inputs, case.constants)
    np.testing.assert_allclose(case.spec.reference(case.inputs, case.constants)[0][0, 1], np.tanh(0.2 * signs), 1e-6)


BATCHES = {f"{batch}-{precision}": (batch, precision)
           for batch, precision in (*((batch, "int16") for batch in (1, 2, 3, 7, 8, 13)), (13, "int8"))}
TILED = {"lstm": {}, "gru": {"cell": "GRU", "linear_before_reset": 1}, "rnn": {"cell": "RNN"}}


@rotated("cpu, items, attrs", by_name(ISA_WIDTHS), BATCHES, TILED)
def test_any_batch_is_cut_into_tiles(attrs, items, cpu, monkeypatch):
    batch, precision = items
    case = Case(node_of(direction="reverse", **attrs), 19, precision, batch)
    monkeypatch.setattr(tiling, "FIRST_LEVEL", 0)
    refined = REFINED if precision == "int16" or not attrs else ()      # of bytes, those of one cell
    tactics = (*kernel_of(case.spec).tactics(cpu.isa), *refined)
    number = ISA_WIDTHS.index(cpu) + [*BATCHES.values()].index(items)
    for tactic in tactics[number % 2::1 if ALL_COMBINATIONS else 2]:
        check(case.spec, cpu, case.inputs, case.constants, tactic=tactic)


@EVERY_ISA_WIDTH
@pytest.mark.parametrize("attrs", [{}, {"cell": "GRU"}], ids=["lstm", "gru"])
def test_the_floats_of_an_item_do_not_depend_on_the_batch(attrs, cpu, monkeypatch):
    case = Case(node_of(direction="reverse", **attrs), 19, batch=8)
    monkeypatch.setattr(tiling, "FIRST_LEVEL", 0)
    number = ISA_WIDTHS.index(cpu) + len(attrs)
    for tactic in REFINED[number % 2::1 if ALL_COMBINATIONS else 2]:
        check(case.spec, cpu, case.inputs, case.constants, FLOAT_SUMS, tactic=tactic)
        whole, = run(case.spec, cpu, case.inputs, case.constants, tactic=tactic)
        for some in (slice(0, 1), slice(1, 4), slice(3, 8)):
            part, = run(case.spec, cpu, [x[some] for x in case.inputs], case.constants, tactic=tactic)
            assert (part == whole[some]).all()


def test_weights_that_leave_the_second_level_of_cache_have_more_tactics():
    small, large = (kernel_of(Case(node_of(), hidden).spec) for hidden in (64, 128))
    best = Panels(3)
    assert not small.refinements(AVX2, best)
    assert {Panels(3, places=4, prefetch=True), Panels(3, alternate=True)} <= set(large.refinements(AVX2, best))


def test_a_batch_matters_where_several_items_share_a_panel():
    in_first_level, beyond, one_by_one = (
        kernel_of(case.spec) for case in (Case(node_of(), 24), Case(node_of(), 64), Case(node_of(), 64, lengths=True)))
    assert [kernel.by_batch for kernel in (in_first_level, beyond, one_by_one)] == [False, True, False]


@EVERY_WIDTH
@pytest.mark.parametrize("batch", [1, 6])
def test_states_come_in_and_go_out(batch, runner):
    for attrs in ({}, {"cell": "GRU"}):
        case = Case(node_of(direction="bidirectional", **attrs), 13, batch=batch, states=True)
        check(case.spec, runner, case.inputs, case.constants, FLOAT_SUMS)


@EVERY_WIDTH
def test_first_states_may_be_constants(runner):
    case = Case(node_of(direction="bidirectional"), 13, given=True)
    check(case.spec, runner, case.inputs, case.constants, FLOAT_SUMS)


@EVERY_WIDTH
def test_a_single_step_goes_from_states_to_states(runner):
    case = Case(node_of(direction="bidirectional"), 13, states=True, steps=1)
    check(case.spec, runner, case.inputs, case.constants, FLOAT_SUMS)


@EVERY_WIDTH
def test_peepholes_look_at_the_cell_state(runner):
    case = Case(node_of(direction="bidirectional"), 13, peepholes=True)
    check(case.spec, runner, case.inputs, case.constants, FLOAT_SUMS)


@EVERY_WIDTH
def test_an_item_of_its_own_length_leaves_zeros_behind_its_end(runner):
    case = Case(node_of(direction="bidirectional"), 13, batch=4, states=True, lengths=True, y="uint8")
    y = run(case.spec, runner, case.inputs, case.constants)[0].reshape(4, STEPS, 2, 13)
    assert (y[0, 3:] == 120).all() and (y[1] == 120).all() and (y[2] != 120).any()
    states = Case(node_of(direction="bidirectional"), 13, batch=4, states=True, lengths=True)
    check(states.spec, runner, states.inputs, states.constants, FLOAT_SUMS)


@EVERY_WIDTH
@pytest.mark.parametrize("y", ["uint8", "bfloat16", "float16"])
def test_gates_and_y_are_stored_in_other_types(y, runner):
    case = Case(node_of("GRU"), 21, "int16", y=y, gates="bfloat16" if y == "bfloat16" else "float32")
    check(case.spec, runner, case.inputs, case.constants)


def test_the_reference_rounds_states_as_the_operator_does():
    case = Case(node_of(direction="bidirectional", rounds_state=1), 7, "int8", states=True, rounds=True)
    weights = case.constants["weights"] * case.constants["scales"][..., None]
    gates, *states = case.inputs
    expected = Operator.compute(case.node, gates, weights, None, None, None, *states)
    for got, wanted in zip(case.spec.reference(case.inputs, case.constants), expected, strict=True):
        np.testing.assert_allclose(got, wanted, 2e-5, 2e-5)


@pytest.mark.parametrize("peepholes", [False, True])
@EVERY_CELL
def test_the_reference_agrees_with_the_operator(attrs, peepholes):
    node = node_of(direction="bidirectional", **attrs)
    if peepholes and node.attrs["cell"] != "LSTM":
        return
    case = Case(node, 7, states=True, lengths=True, peepholes=peepholes)
    weights, *units = case.real
    gates, *states, lengths = case.inputs
    bias = units[0] if node.attrs["linear_before_reset"] else None
    expected = Operator.compute(node, gates, weights, bias, np.concatenate(units, 1) if peepholes else None, lengths,
                                *states)
    for got, wanted in zip(case.spec.reference(case.inputs, case.constants), expected, strict=True):
        np.testing.assert_allclose(got, wanted, 2e-5, 2e-5)


@pytest.mark.parametrize("precision, sizes, error", [("int16", (8, 64, 600), 3e-3), ("int8", (8, 600, 5000), 3e-2)])
def test_whole_weights_are_as_fine_as_their_sums_allow(precision, sizes, error):
    random = np.random.default_rng(0)
    for hidden in sizes:
        weights = random.standard_normal((1, 4, hidden)).astype(np.float32)
        whole, scales = integer_weights(weights, precision)
        stored = QUANTIZED_STATES[precision]
        assert np.abs(whole.astype(np.int64)).sum(2).max() * (stored.one + stored.zero) < 2 ** 31
        np.testing.assert_allclose(whole * scales[..., None] * stored.one, weights, atol=error)
    assert integer_weights(np.zeros((1, 3, 4), np.float32), precision)[0].max() == 0


def test_weights_that_leave_the_second_level_of_cache_have_8_bits():
    """An LSTM of 128 units keeps 16 bits; for larger ones memory traffic dominates."""
    assert [integer_precision(np.zeros((2, 4 * hidden, hidden))) for hidden in (128, 256)] == ["int16", "int8"]
    case = Case(node_of(), 32, "int8")
    assert case.constants["weights"].dtype == np.int8
    assert 2 * kernel_of(case.spec).step_bytes == kernel_of(Case(node_of(), 32, "int16").spec).step_bytes


def test_only_states_between_minus_one_and_one_are_multiplied_as_integers():
    assert bounded(node_of()) and bounded(node_of("GRU")) and bounded(node_of("RNN"))
    assert not bounded(node_of("RNN", activations=("Relu",)))
    assert not bounded(node_of(activations=("Sigmoid", "Tanh", "Relu")))
    assert not bounded(node_of("GRU", activations=("Tanh", "Tanh")))


def test_the_constants_of_two_directions_are_not_confused():
    case = Case(node_of(direction="bidirectional"), 9)
    swapped = {**case.constants, "weights": case.constants["weights"][::-1]}
    got = run(case.spec, CpuRunner(PORTABLE), case.inputs, case.constants)[0]
    assert not np.allclose(got, case.spec.reference(case.inputs, swapped)[0], atol=1e-2)


def test_a_tile_of_items_takes_the_registers_that_its_gates_leave():
    kernel = kernel_of(Case(node_of("GRU", linear_before_reset=1), 64).spec)
    assert kernel.tile_items(AVX512_VNNI) == 8 and kernel.tile_items(AVX2) == 4
    assert kernel.vectors(AVX512_VNNI, Panels(4), kernel.problem.cells[0].stages[0], 8) == 1
    assert fits(AVX2, 4, 3) and not fits(AVX2, 4, 4) and fits(AVX2, 1, 14)
    in_cache = kernel_of(Case(node_of("GRU", linear_before_reset=1), 64, "int16").spec)
    assert in_cache.tile_items(AVX512_VNNI) == in_cache.tile_items(AVX2) == 1
