"""Random graphs lowered by a symbolic plan, beside the same graphs lowered for the extents alone.

Every extent that an input has is left open, equal ones by one name. The graph is imported, optimised and lowered once
with extents that are counted; the function which that becomes must give, for other extents, the calls, the buffers and
the constants that they have by themselves, or nothing.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import onnx

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.errors import EngineError
from infer_server.engines.frontend.extents import open_extents, open_types
from infer_server.engines.frontend.onnx_file import read_model
from infer_server.engines.ir.symbolic import NotSymbolic, ShapeEnv
from infer_server.engines.lowering.buffers import buffers_of
from infer_server.engines.lowering.lower import lower
from infer_server.engines.lowering.nest.program import NestProgram
from infer_server.engines.plan.symbolic.functions import function_of, guards_of
from tests.net.graphs import Case

LANES, TRIES = 8, 6
Extents = Mapping[str, int]


def check(case: Case) -> str:
    """Raise AssertionError if a symbolic plan is wrong, else return the outcome.

    It is "served", "traced" if its guards held for no other shapes, or the reason why there is no symbolic plan.
    """
    if any(0 in array.shape for array in case.inputs.values()):
        return "empty"          # constants of no elements are merged where they are known to have none
    subject, extents = opened(case)
    try:
        lowered(subject, extents)
    except EngineError:
        return "refused"
    env = ShapeEnv()
    symbols = {name: env.extent(name, extent) for name, extent in extents.items()}
    try:
        created = function_of(lowered(subject, symbols), env, len(symbols), checked=True)
        holds = guards_of(env, len(symbols))
    except (NotSymbolic, EngineError):
        return "pinned"
    chance, served = Random(str(extents)), 0
    for others in (extents, *({name: max(1, extent + chance.randrange(-2, 6)) for name, extent in extents.items()}
                              for _ in range(TRIES))):
        try:
            with np.errstate(all="ignore"):
                ours = created(*others.values()) if holds(*others.values()) else None
        except (EngineError, ArithmeticError, ValueError, IndexError):
            ours = None
        assert ours is not None or others is not extents, f"its own guards do not hold: {case!r}"
        if ours is not None:
            actual = next(differences(ours, lowered(subject, others)), "")
            assert not actual, f"{dict(extents)}, {others}: {actual}\n{case!r}"
            served += others != extents
    return "served" if served else "traced"


def opened(case: Case) -> tuple[Subject, dict[str, int]]:
    """Return the case's model with symbolic dimensions, and their values."""
    model = onnx.ModelProto.FromString(case.model().SerializeToString())
    for dim in (dim for info in model.graph.input for dim in info.type.tensor_type.shape.dim if dim.dim_value > 0):
        dim.dim_param = f"d{dim.dim_value}"
    source = read_model(model)
    types = open_types(source.name, source.declared(), {}, False)
    names = open_extents(types)
    precision = case.precision if case.precision in ("fp16", "bf16") else "fp32"
    builder = Builder(BuildConfig(precision, timing=False))
    numbers = {name: int(name[1:]) if name[1:].isdecimal() else 3 for name in names}
    return Subject(builder, source, types, dict.fromkeys(names, 0), dependence=""), numbers


def lowered(subject: Subject, extents: Extents) -> Any:
    graph = subject.builder.stored(subject.import_graph(extents))
    created = lower(graph, LANES)
    read = {placement.constant for call in created.calls for placement in call.inputs}.union(
        *(call.node.inputs for call in created.calls))
    constants = {name: graph.constants[name] for name in sorted(read & graph.constants.keys())}
    return created.calls, buffers_of(created, 4), constants, {name: graph.types[name] for name in graph.outputs}


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Yield the differences of two values.

    Nests are equal if they compute the same, though an operation may occur twice.
    """
    if isinstance(a, NestProgram) and isinstance(b, NestProgram):
        a, b = meaning(a), meaning(b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        a, b = np.asarray(a), np.asarray(b)
        if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
            yield f"{path}: {a!r} and {b!r}"
    elif dataclasses.is_dataclass(a) and type(a) is type(b):
        for field in dataclasses.fields(a):
            yield from differences(getattr(a, field.name), getattr(b, field.name), f"{path}.{field.name}")
    elif isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        for key in a:
            yield from differences(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b):
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{path}[{place}]")
    elif repr(a) != repr(b):
        yield f"{path}: {a!r} and {b!r}"


def meaning(program: NestProgram) -> Sequence[Any]:
    """Return a nest's results as trees of operations."""
    trees: list[Any] = []
    for one in program.operations:
        trees.append((one.op, one.kind, tuple(trees[arg] for arg in one.args), one.what))
    return [trees[result] for result in program.results]
