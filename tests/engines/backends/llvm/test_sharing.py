"""Plans of one model for several shapes share packed constants."""
import numpy as np
import pytest

from infer_server.engines import build_engine
from infer_server.engines.backends.llvm.constants import TAIL, PackedConstants
from infer_server.engines.compiler.specialise import Specialiser
from tests.engines.compiler.open_models import node, random
from tests.engines.compiler.small_models import small_model


def test_what_the_first_plan_does_not_have_is_packed_once_for_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 8 rows the tile is narrower than at 128."""
    model = small_model([node("MatMul", "x w", "y")], {"x": ["N", "T", 64]}, ["y"], {"w": random(64, 40)})
    plan = build_engine(model, cache=False, timing=False, target="avx2").plan
    packed, pack = [], PackedConstants._pack
    monkeypatch.setattr(PackedConstants, "_pack",
                        lambda self, call, choice: packed.append(call) or pack(self, call, choice))
    specialiser = Specialiser(plan)
    plans = [specialiser.plan({"T": rows}) for rows in (8, 7, 8)]
    own = [len(one.machine.constants) - TAIL for one in plans]
    assert plan.extents == {"T": 128} and own[0] == own[2] == 64 * 40 * 4
    assert len(packed) == len(set(own)), "one that reads the first plan's is packed to see that, once, too"
    assert plans[0].machine.constants == plans[2].machine.constants


def test_what_depends_on_where_pixels_lie_is_packed_for_each_width() -> None:
    """Pairs of taps are chosen by their distance in memory."""
    model = small_model([node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "d"),
                         node("QuantizeLinear", "w s", "k"), node("DequantizeLinear", "k s", "v"),
                         node("Conv", "d v", "y", pads=[1, 1, 1, 1])], {"x": ["N", 4, "H", "W"]}, ["y"],
                        {"w": random(8, 4, 3, 3), "s": np.float32(0.02), "z": np.uint8(128)})
    plan = build_engine(model, cache=False, timing=False, target="avx2").plan
    specialiser = Specialiser(plan)
    for width in (9, 14, 20):
        alone = Specialiser(plan).plan({"H": 9, "W": width})
        assert specialiser.plan({"H": 9, "W": width}).machine.constants == alone.machine.constants
