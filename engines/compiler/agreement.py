"""Comparison of two plans of a model on random inputs, to verify what a symbolic plan makes."""
from __future__ import annotations

import logging

import numpy as np

from infer_server.engines.errors import EngineError
from infer_server.engines.ir.dtypes import dtype_named
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import IoTensor, Plan
from infer_server.engines.runtime.specialisation import Specialisation

log = logging.getLogger(__name__)

# Tolerances, relative to the largest value of an output: plans may sum in different orders and round differently.
CLOSE = 1e-3            # tolerance for plans that compute only in float32
ROUNDED = 3e-2          # tolerance for all other plans
PART = 1 << 20          # elements that are compared at once
CHANGED = 0.01          # share of integer elements that may differ: an ArgMax of nearly equal values may change


def agree(plan: Plan, other: Plan, first: Specialisation) -> bool:
    """Return True if two plans agree on random inputs within the tolerance of a precision.

    Integers are drawn from 0 and 1, which are valid indices of most tables. False if the model rejects the inputs.

    Parameters
    ----------
    plan, other : Plan
        Plans of one model with equal inputs.
    first : Specialisation
        Specialisation whose constants the plans share.
    """
    random = np.random.default_rng(0)
    feeds = {io.name: _drawn(random, io, min(plan.max_batch, 2)) for io in plan.inputs}
    try:
        ours, theirs = (Specialisation(one, base=first if one.machine.shared else None).run(feeds)
                        for one in (plan, other))
    except EngineError as error:        # the model may not take such numbers
        log.warning("%s: random numbers cannot be run: %s", plan.name, error)
        return False
    # A float build may have integers, too: sums that differ by a bit round to another integer.
    close = CLOSE if all(step.precision == "fp32" for step in plan.machine.steps) else ROUNDED
    unlike = [name for name, array in theirs.items() if not _alike(ours[name], array, close)]
    if unlike:
        log.warning("%s: %d outputs differ: '%s' %s", plan.name, len(unlike), unlike[0],
                    _difference(ours[unlike[0]], theirs[unlike[0]]))
    return not unlike


def _drawn(random: np.random.Generator, io: IoTensor, items: int) -> Array:
    shape, dtype = io.shape_of(items), dtype_named(io.dtype)
    drawn = random.integers(0, 2, shape) if dtype.kind in "iub" else random.normal(size=shape)
    return drawn.astype(dtype)


def _difference(a: Array, b: Array) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"is {a.dtype}{list(a.shape)}, and {b.dtype}{list(b.shape)}"
    x, y = a.astype(np.float64), b.astype(np.float64)
    both = np.isfinite(x) & np.isfinite(y)
    largest, of = (np.max(np.abs(array), initial=0.0, where=both) for array in (x - y, y))
    alone = int((np.isfinite(x) != np.isfinite(y)).sum())
    return f"by up to {largest:g} of {of:g}, {alone} elements are finite in one of them alone"


def _alike(a: Array, b: Array, close: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind in "iub":
        return not a.size or float(np.mean(a != b)) <= CHANGED
    largest = difference = 0.0
    for begin in range(0, b.size, PART):        # in parts, because logits of a prompt may be large
        x, y = (array.reshape(-1)[begin:begin + PART].astype(np.float64) for array in (a, b))
        finite = np.isfinite(y)
        if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
            return False
        difference = max(difference, float(np.max(np.abs(x - y), initial=0.0, where=finite)))
        largest = max(largest, float(np.max(np.abs(y), initial=0.0, where=finite)))
        if not np.isfinite(x[finite]).all():
            return False
    return difference <= close * largest
