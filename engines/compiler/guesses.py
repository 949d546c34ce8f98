"""Numbers for the extents that a model leaves open, where neither the user nor data says any.

Likely ones come first. Where the model refuses them, the question that they failed says which it would have taken: they
are imported as numbers that are counted (engines.ir.counted), and the last answer is turned around, as long as that
leads to others: channels that a convolution's weights do not fit become theirs, an axis too short for constant indices
becomes as long as they reach.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping

from engines.errors import EngineError
from engines.frontend.extents import likely_extents, open_extents, shapes_for
from engines.frontend.onnx_file import OnnxModel
from engines.frontend.onnx_import import graph_from_onnx
from engines.ir.counted import Counting, Pinned, plain
from engines.ir.graph import TensorType
from engines.plan.extents import Extents

ALIKE = (1, 64, 32, 16, 2)          # for all open extents, where the likely ones make no graph ...
LENGTHS = (128, 512, 1024, 4096)    # ... and for those that come last, where the others are 1: signals beside states
MOST_TURNS = 16                     # of answers, for one guess


def guesses(source: OnnxModel, types: Mapping[str, TensorType], all_of_them: bool = True) -> Iterator[Extents]:
    """Numbers for all open extents, the likeliest first; the others beside likely ones only if `all_of_them` are asked
    for."""
    likely = likely_extents(types)
    yield likely
    if fitting := _fitting(source, types, likely):
        yield fitting
    if not all_of_them:
        return
    names = open_extents(types)
    for number in ALIKE:
        yield dict.fromkeys(names, number)
    last = {kind.shape[-1] for kind in types.values() if kind.shape}
    for length in LENGTHS:
        yield {name: length if name in last else 1 for name in names}


def _fitting(source: OnnxModel, types: Mapping[str, TensorType], extents: Extents) -> Extents | None:
    """The numbers nearest to these that the importer takes; None: these, or it is not to be told. Where an answer that
    several extents turn around leads nowhere by the first, it is the next one's turn."""
    found, waiting = [extents], [extents]
    for _ in range(MOST_TURNS):
        if not waiting:
            return None
        tried, counting = waiting.pop(), Counting()
        counted = {name: counting.extent(name, number) for name, number in tried.items()}
        try:
            graph_from_onnx(source, shapes=shapes_for(types, counted))
            return None if tried is extents else tried
        except Pinned:
            continue
        except EngineError:
            others = [other for other in _turned(counting, tried) if other not in found]
        found += others
        waiting += reversed(others)
    return None


def _turned(counting: Counting, extents: Extents) -> Iterator[Extents]:
    """The extents with the least change of one of them that turns the last answer around, for each that does."""
    if not counting.guards:
        return
    (relation, polynomial), answer = next(reversed(counting.guards.items()))
    if relation == "==" and answer:
        return
    way = (-1 if relation == "<" and not answer else 0) - plain(counting.of(polynomial))
    for monomial, factor in polynomial:
        name = counting.atoms[monomial[0]] if len(monomial) == 1 else None
        if not isinstance(name, str) or relation == "==" and way % factor:
            continue
        change = -(-abs(way) // abs(factor)) * (1 if way * factor > 0 else -1)
        if extents[name] + change >= 1:
            yield {**extents, name: extents[name] + change}
