"""Lowering has a rule for each trait that an operator declares."""
import pytest

from infer_server.engines.lowering import lower  # noqa: F401  (fills RULES)
from infer_server.engines.lowering.calls.aliasing import VIEWS
from infer_server.engines.lowering.calls.calls import RULES
from infer_server.engines.lowering.epilogue.from_onnx import WRITERS
from infer_server.engines.ops import OPS, Stored


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.epilogue])
def test_what_an_epilogue_can_do_has_a_writer(name):
    assert name in WRITERS


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.anchor or op.stored is not Stored.FLOAT])
def test_what_kernels_read_and_write_in_other_types_than_float32_has_kernels(name):
    assert name in RULES or name in VIEWS or name == "Concat"


@pytest.mark.parametrize("name", [*RULES, *WRITERS])
def test_what_lowering_has_a_rule_for_is_an_operator(name):
    assert name in OPS
