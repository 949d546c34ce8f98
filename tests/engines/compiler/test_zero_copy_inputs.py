"""Zero-copy inputs of contexts of compiled plans."""
from __future__ import annotations

import numpy as np

from infer_server.engines import build_engine
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.arena import PAGE
from tests.engines.compiler.open_models import node
from tests.engines.compiler.small_models import small_model

SHAPE = (4, 64, 64)


def ending_at(place: int, value: float) -> Array:
    """Return an array of two items whose last byte is at offset `place` of its page."""
    memory = np.zeros(1 << 20, np.uint8)
    size = 2 * int(np.prod(SHAPE)) * 4
    begin = (place + 1 - memory.ctypes.data - size) % PAGE
    array = memory[begin:begin + size].view(np.float32).reshape(2, *SHAPE)
    array[...] = value
    return array


def test_what_one_run_was_lent_is_not_read_by_the_next_one() -> None:
    """`b` ends with its page, so it is copied, though `a` was already redirected."""
    model = small_model([node("Relu", "a", "ra"), node("Relu", "b", "rb"), node("Concat", "ra rb", "y", axis=1)],
                        {"a": ["n", *SHAPE], "b": ["n", *SHAPE]}, ["y"])
    context = build_engine(model, cache=False, timing=False, max_batch=4).engine().create_context()
    assert context.zero_copy_inputs == {"a", "b"}
    lent, copied, items = ending_at(2047, 7), ending_at(PAGE - 1, 1), ending_at(2047, 5)
    context.run({"a": lent, "b": copied}, 2)
    lent[...] = 99                                          # the caller owns the array again
    context.input("a", 2)[...] = 3
    context.execute_with(2, {"b": [items]})
    y = context.output("y", 2)
    assert (y[:, :4] == 3).all() and (y[:, 4:] == 5).all()
