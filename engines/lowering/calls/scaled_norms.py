"""Merging of a norm with the scaling of its rows, so that a row is read while it is in the first-level cache."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

from infer_server.engines.lowering.calls.calls import AnyCall, ProblemCall
from infer_server.engines.lowering.problems.rows import Norm, ScaledNorm, ScaledRows


def with_scaled_norms(calls: Iterable[AnyCall]) -> tuple[AnyCall, ...]:
    """Return the calls with each ScaledRows merged into the Norm before it whose result it reads."""
    merged: list[AnyCall] = []
    for call in calls:
        before = merged[-1] if merged else None
        if isinstance(before, ProblemCall) and isinstance(call, ProblemCall) and _reads_norm(before, call):
            merged[-1] = _scaled_norm(before, call)
        else:
            merged.append(call)
    return tuple(merged)


def _reads_norm(norm: ProblemCall, scaled: ProblemCall) -> bool:
    return (type(norm.problem) is Norm and isinstance(scaled.problem, ScaledRows)
            and scaled.inputs == norm.outputs and scaled.problem.sources == norm.problem.outputs)


def _scaled_norm(norm: ProblemCall, scaled: ProblemCall) -> ProblemCall:
    assert isinstance(scaled.problem, ScaledRows)
    known = {field.name: getattr(norm.problem, field.name) for field in fields(Norm)}
    problem = ScaledNorm(**known, rows=scaled.problem.y, scales=scaled.problem.scales)
    return replace(norm, problem=problem, outputs=(*norm.outputs, *scaled.outputs))
