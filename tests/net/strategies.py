"""Hypothesis strategies for graphs of one family, or of all."""
from __future__ import annotations

from collections.abc import Sequence

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from tests.net.families import EVERY, FAMILIES, Family
from tests.net.graphs import FLOATS, INTEGERS, Case, Draw, Sketch

PRECISIONS = ("fp32", "fp16", "bf16", "int8", "best")
MIXED = "mixed"
NAMES = (*FAMILIES, MIXED)


@st.composite
def cases(draw: Draw, family: str) -> Case:
    """Draw one to three nodes of the family, or two to six of any for "mixed"."""
    floats = draw(st.sampled_from((*["float32"] * 3, *FLOATS[1:])))
    integers = draw(st.sampled_from(("int64", "int32", *INTEGERS)))
    sketch = Sketch(draw, draw(st.integers(0, 999)), floats, integers, draw(st.booleans()))
    low, high, parts = (2, 6, EVERY) if family == MIXED else (1, 3, FAMILIES[family])
    return _grown(sketch, parts, draw(st.integers(low, high)))


def _grown(sketch: Sketch, parts: Sequence[Family], count: int) -> Case:
    for _ in range(count):
        part = sketch.draw(st.sampled_from(parts))
        try:
            part(sketch)
        except (InvalidArgument, ZeroDivisionError):        # there is no number below 0 extents
            reject()
    if not sketch.used & sketch.inputs.keys():
        reject()
    return sketch.case(sketch.draw(st.sampled_from(PRECISIONS)))
