"""Guesses of numbers for a model's open extents, used if neither the user nor the data gives any.

Likely numbers come first. If the importer rejects them, the model is imported again with symbolic numbers
(infer_server.engines.ir.symbolic), and the extents are changed so that the last guard before the error has the opposite
outcome, as long as that gives new numbers. For example, an extent becomes the number of channels of a convolution's
weights, or an axis becomes as long as constant indices require.
"""
from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice

from infer_server.engines.errors import EngineError
from infer_server.engines.frontend.extents import SOME, is_decoder, likely_extents, open_extents, shapes_for
from infer_server.engines.frontend.onnx_file import OnnxModel
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ir.dtypes import dtype_named
from infer_server.engines.ir.graph import TensorType
from infer_server.engines.ir.polynomials import Polynomial, number_of
from infer_server.engines.ir.symbolic import NotSymbolic, Quotient, ShapeEnv, plain
from infer_server.engines.plan.extents import CACHE_CAPACITY, CACHES, Extents
from infer_server.engines.plan.plan import Plan

ALIKE = (1, 64, 32, 16, 2)          # numbers for all open extents, tried after the likely ones
LENGTHS = (128, 512, 1024, 4096)    # numbers for last axes while other extents are 1: signals with recurrent states
MOST_TURNS = 16                     # maximum number of changes of one guess
DEEPEST = 32                        # maximum depth of nested quotients, as strides create them
# Differences between the usual extents and others at which the build lowers a model, too. An odd difference has other
# vector tails; then multiples of 8 and 32.
STEPS = (-27, 8, 32, -32, 1, -1)
# Shapes of decoders that the build makes symbolic plans for: (past tokens, new tokens, capacity of caches in place).
# Each pair is of one kind, one token or a prompt: the first is traced, the second verifies.
OF_DECODERS = (((43, 1, 512), (SOME, 1, 768)), ((0, 200, 512), (0, 208, 768)))
LARGE_BYTES = 64 << 20          # constants of decoders of which only steps of one token are traced at the build
# Multiples of the usual extents of other models, in such pairs, too.
MULTIPLES = ((Fraction(5, 128), Fraction(1, 32)), (Fraction(5, 32), Fraction(1, 8)), (Fraction(9, 4), Fraction(2)))


def guesses(source: OnnxModel, types: Mapping[str, TensorType], all_of_them: bool = True) -> Iterator[Extents]:
    """Yield numbers for all open extents, the likeliest first; unlikely ones only if `all_of_them`."""
    for past in (SOME, 0) if is_decoder(types) else (0,):
        likely = likely_extents(types, past)
        yield likely
        if all(likely.values()) and (fitting := _fitting(source, types, likely)):      # symbols from 1 on
            yield fitting
    if not all_of_them:
        return
    names = open_extents(types)
    for number in ALIKE:
        yield dict.fromkeys(names, number)
    last = {kind.shape[-1] for kind in types.values() if kind.shape}
    for length in LENGTHS:
        yield {name: length if name in last else 1 for name in names}


def stepped(extents: Extents, decided: Collection[int | str] = ()) -> Iterator[Extents]:
    """Yield other extents, in the order of STEPS; each different number is changed by another multiple of a step.

    decided: extents that are not changed.
    """
    usual = {name: extent for name, extent in extents.items() if isinstance(extent, int) and name not in decided}
    places = {extent: place for place, extent in enumerate(dict.fromkeys(usual.values()), 1)}      # equal: one place
    for step in STEPS if usual else ():
        changed = {name: extent + step * places[extent] for name, extent in usual.items()}
        if min(changed.values()) >= 1:
            yield {**extents, **changed}


def foreseen(plan: Plan) -> list[Sequence[Extents]]:
    """Return the kinds of shapes that the build makes symbolic plans for, each with several shapes.

    The second shape of a kind is to be served by a symbolic plan that was traced at another one. Kinds are the opt, min
    and max shapes of profiles; without profiles the usual shapes and multiples of them, for a decoder one token and a
    prompt, with caches in place, too.
    """
    part = plan.open_part
    decided = {extent for io in part.declared if io.name in part.deciding for extent in io.shape}
    types = {io.name: TensorType(dtype_named(io.dtype), io.shape) for io in part.declared}
    if is_decoder(types) and not part.profiles and not part.deciding:
        capacities = (False, True) if CACHES in plan.metadata else (False,)
        pairs = OF_DECODERS if len(plan.machine.constants) <= LARGE_BYTES else OF_DECODERS[:1]
        return [[{**likely_extents(types, past, new), **({CACHE_CAPACITY: capacity} if in_place else {})}
                 for past, new, capacity in pair] for in_place in capacities for pair in pairs]
    kinds: list[Sequence[Extents]] = []
    for extents in (plan.extents, *(one.extents for one in part.others)):
        others = [*stepped(extents, decided)]
        kinds.append([*others[:1], extents, *others[1:]])
    for bounds in part.profiles:
        least, opt, most = ({**plan.extents, **{name: bounds[name][which] for name in plan.extents if name in bounds}}
                            for which in range(3))
        kinds += [[_between(end, opt), end] for end in (least, most) if end != opt]
    if not part.profiles:
        kinds += [pair for factors in MULTIPLES if all(pair := [_times(plan.extents, factor, decided)
                                                                for factor in factors])]
    return [kind for kind in kinds if len(kind) > 1]


def _between(end: Extents, opt: Extents) -> Extents:
    """Return extents next to those of an end of a profile, towards its opt shapes."""
    return {name: number + (opt[name] - number) // 4 if isinstance(number, int) else number
            for name, number in end.items()}


def _times(extents: Extents, factor: Fraction, decided: Collection[int | str]) -> Extents:
    """Return a multiple of the extents; {} if it is not of whole numbers."""
    numbers = {name: number * factor for name, number in extents.items()
               if isinstance(number, int) and name not in decided}
    whole = all(number.denominator == 1 and number for number in numbers.values())
    return {**extents, **{name: int(number) for name, number in numbers.items()}} if whole else {}


def _fitting(source: OnnxModel, types: Mapping[str, TensorType], extents: Extents) -> Extents | None:
    """Return the nearest numbers that the importer accepts; None if it accepts these or none are found.

    If several extents could change a guard, they are tried in turn (depth-first search).
    """
    found, waiting = [extents], [extents]
    for _ in range(MOST_TURNS):
        if not waiting:
            return None
        tried, env = waiting.pop(), ShapeEnv()
        symbols = {name: env.extent(name, number) for name, number in tried.items()}
        try:
            graph_from_onnx(source, shapes=shapes_for(types, symbols))
            return None if tried is extents else tried
        except NotSymbolic:
            continue
        except EngineError:
            others = [other for other in _turned(env, tried) if other not in found]
            if not others and tried is not extents and _is_graph(source, types, tried):
                return tried            # the importer may accept plain numbers where symbolic ones are undecided
        found += others
        waiting += reversed(others)
    return None


def _is_graph(source: OnnxModel, types: Mapping[str, TensorType], extents: Extents) -> bool:
    """Return True if the importer takes these numbers."""
    try:
        graph_from_onnx(source, shapes=shapes_for(types, extents))
    except EngineError:
        return False
    return True


def _turned(env: ShapeEnv, extents: Extents) -> Iterator[Extents]:
    """Yield the extents with the least change of one of them that reverses the last guard, for each that can."""
    if not env.guards:
        return
    (relation, polynomial), answer = next(reversed(env.guards.items()))
    if relation == "==" and answer:
        return
    value = plain(env.of(polynomial))
    wanted = (-value, -value) if relation == "==" else (-value, math.inf) if answer else (-math.inf, -1 - value)
    for name, change in islice(_changes(env, polynomial, *wanted), MOST_TURNS):
        if extents[name] + change >= 1:
            yield {**extents, name: extents[name] + change}


def _changes(env: ShapeEnv, polynomial: Polynomial, low: float, high: float,
             depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield (extent, change) such that the change alone adds between low and high to a polynomial.

    Extents inside quotients, which strides and pools create, are included.
    """
    for monomial, factor in polynomial:
        if len(monomial) != 1:
            continue
        ends = sorted((low / factor, high / factor))
        least, most = math.ceil(ends[0]) if ends[0] > -math.inf else -math.inf, (
            math.floor(ends[1]) if ends[1] < math.inf else math.inf)
        atom = env.atoms[monomial[0]]
        if least > most:
            continue
        if isinstance(atom, str):
            yield atom, int(least if least > 0 else most if most < 0 else 0)
        elif isinstance(atom, Quotient) and (by := number_of(atom.by) or 0) > 0 and depth < DEEPEST:
            over = plain(env.of(atom.over))
            inner = (over // by + least) * by - over, (over // by + most + 1) * by - 1 - over
            yield from _changes(env, atom.over, *inner, depth + 1)
