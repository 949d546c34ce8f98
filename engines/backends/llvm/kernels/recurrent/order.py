"""Order of the tiles in a step of a recurrence: of items, and of units forwards and backwards."""
from __future__ import annotations

from collections.abc import Iterator

from infer_server.engines.backends.llvm.kernels.common.access import tails
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import I64


def there_and_back(f: Function, extent: int, step: int, back: Value) -> Iterator[tuple[Value, int]]:
    """Yield (start, size) of tiles of 0..extent-1 as Function.tiles does; if `back`, from the last to the first."""
    whole, tail = divmod(extent, step)
    last = f.constant(extent - tail, I64), tail
    if tail:
        with f.when(back):
            yield last
    if whole:
        for i in f.loop("units", whole):
            yield f.select(back, whole - 1 - i, i) * step, step
    if tail:
        with f.when(back.compare("eq", 0)):
            yield last


def tiles_of_items(f: Function, size: int, count: Value) -> Iterator[tuple[Value, int]]:
    """Yield (first item, items) of the tiles of `count` items.

    Full tiles come first, then one of 4, 2, 1 for each bit of the rest.
    """
    whole = count.divided(size)
    for item in f.range("tile", count.like(0), whole * size, size):
        yield item, size
    yield from tails(whole, count.remainder(size), size)
