"""Common layouts for weights that several problems share, so that a plan holds each weight in few layouts.

A detection head runs the same convolutions on images of five sizes. Timed one by one, each size may take a tactic that
packs the weights in another layout, and the plan would hold the weights five times. Where the times differ little, one
layout is taken for all of them.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.tuning.candidates import Candidate
from infer_server.engines.ir.content import EqualArrays
from infer_server.engines.lowering.problems.problem import Problem

LEAST_BYTES = 1 << 12       # weights below this size may be stored in any number of layouts
TOLERANCE = 1.03            # most time with a common layout, relative to the least time of a problem
COST_TOLERANCE = 1.1        # most cost with a common layout, relative to the least cost, whose error is as large


def sharing_problems(calls: Iterable[tuple[Problem, Mapping[str, Any]]]) -> list[tuple[Problem, ...]]:
    """Return the groups of at least two different problems that have calls with equal weights.

    calls: the problem and the constants of each.
    """
    weights, users = EqualArrays(), dict[int, dict[Problem, None]]()
    for problem, constants in calls:
        array = constants.get("weights")
        if isinstance(array, np.ndarray) and array.nbytes >= LEAST_BYTES:
            users.setdefault(weights.number(array), {})[problem] = None
    return list(dict.fromkeys(tuple(group) for group in users.values() if len(group) > 1))


def layout(one: Candidate) -> Any:
    """Return a key that, together with the weights, decides how a candidate packs them; comparable between problems."""
    anywhere = one.kernel.packing_anywhere(one.tactic)
    return type(one.kernel), one.kernel.packing(one.tactic) if anywhere is None else anywhere


def with_common_layouts(taken: Mapping[Problem, Candidate], groups: Iterable[Sequence[Problem]],
                        scores: Mapping[Problem, Mapping[Candidate, float]], tolerance: float
                        ) -> dict[Problem, Candidate]:
    """Replace candidates so that the problems of a group pack their weights in as few layouts as `tolerance` allows.

    Parameters
    ----------
    taken : candidate of each problem.
    groups : problems that share weights.
    scores : times or costs of the candidates of each problem; the least is the best.
    tolerance : most score of a replacement, relative to that of the candidate taken.
    """
    result = dict(taken)
    for group in groups:
        best = {problem: _best_of_layouts(taken[problem], scores[problem], tolerance)
                for problem in group if problem in scores}
        while best:
            layouts = dict.fromkeys(key for of_problem in best.values() for key in of_problem)
            covered = {key: [problem for problem in best if key in best[problem]] for key in layouts}
            common = min(layouts, key=lambda key: (-len(covered[key]), sum(best[p][key][0] for p in covered[key])))
            for problem in covered[common]:
                result[problem] = best.pop(problem)[common][1]
    return result


def _best_of_layouts(taken: Candidate, scores: Mapping[Candidate, float], tolerance: float
                     ) -> dict[Any, tuple[float, Candidate]]:
    """Return the best candidate of each layout within tolerance, with its score relative to that of `taken`."""
    best = {layout(taken): (1.0, taken)}
    if least := scores.get(taken, 0.0):
        for one, score in scores.items():
            if score / least <= min(tolerance, best.get(layout(one), (tolerance,))[0]) and layout(one) != layout(taken):
                best[layout(one)] = score / least, one
    return best
