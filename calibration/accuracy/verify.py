"""Verification: an engine's outputs beside those that the model should give, and a verdict by the engine's precision.

    verification = verify("m.plan", "m.onnx")
    print(verification)
    verification.faults                     # () if every output is within its limits
"""
from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibration.accuracy.measures import cosine, sqnr_db
from calibration.accuracy.oracle import Oracle, oracle_of, reference_of, reference_of_specialisations
from calibration.data.generated import generated
from calibration.data.items import CalibrationData, Feed
from engines.compiler.specialise import graph_at
from engines.frontend.inputs import Value
from engines.ir.dtypes import BITS, as_named
from engines.ir.graph import Array, Dim, Graph
from engines.ir.pixels import Pixels
from engines.loading import load_engine
from engines.plan.plan import IoTensor, Plan
from engines.runtime.engine import Engine
from engines.runtime.open_engine import OpenEngine
from engines.runtime.program_engine import AnyEngine, ProgramEngine

TOGETHER = 3            # items of the batches, beside single ones
BATCHES = 4             # of so many items, where there are as many
_QUANTISE = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})


@dataclass(frozen=True)
class Limits:
    """The largest errors that a precision allows an output: as a share of its range, or as SQNR where single values
    say little; of integers and booleans, the share of elements that differ."""
    relative: float = math.inf
    sqnr_db: float = -math.inf
    differing: float = 0.01


LIMITS = {
    "fp32": Limits(relative=1e-3),                          # sums in another order: 1e-6 to 1e-4
    "fp16": Limits(relative=2e-2, differing=0.1),           # 11 bits a tensor, over all layers
    "bf16": Limits(relative=1e-1, differing=0.2),           # 8 bits
    "int8": Limits(sqnr_db=6.0, differing=0.5),             # an error half as large as the signal
}
_ADVICE = {
    "fp32": "float32 leaves no room for that: it is a fault of the compiler, to be reported with the model, or the "
            "model makes much of the last bits of its sums on these inputs: give typical ones, --calib",
    "fp16": "build with --fp32 --verify: if that passes, the model needs more than float16 has",
    "bf16": "build with --fp32 --verify: if that passes, the model needs more than bfloat16 has",
    "int8": "build with --fp32 --verify: if that passes, quantisation is what costs it: calibrate on more and typical "
            "data, check --preprocess, or leave nodes in float with --keep-float",
}


@dataclass(frozen=True)
class OutputErrors:
    """How far one output is from what it should be, over all items. Errors are of elements that are finite in both.

    largest     absolute; `relative` is it as a share of the output's range, largest minus smallest value expected
    item        the item that has it, counted from 0 in the order of the data
    odd         elements that are NaN or infinite in one of the two, and not the same in the other
    differing   share of the elements that are not equal
    wrong       why there is nothing to compare: another dtype or shape, no finite value; "" if there is
    """
    name: str
    largest: float = 0.0
    relative: float = 0.0
    mean: float = 0.0
    median: float = 0.0
    item: int = 0
    sqnr_db: float = math.inf
    cosine: float = 1.0
    odd: int = 0
    differing: float = 0.0
    floating: bool = True
    wrong: str = ""

    def fault(self, limits: Limits) -> str:
        """The first limit that the output exceeds, in words; "" if none."""
        if self.wrong or self.odd:
            return self.wrong or f"{self.odd} elements are NaN or infinite in one of the two only"
        if not self.floating:
            return (f"{100 * self.differing:.1f} % of the elements differ; at most {100 * limits.differing:g} % may"
                    if self.differing > limits.differing else "")
        if not self.relative <= limits.relative:
            return (f"its largest error is {self.relative:.3g} of its range (item {self.item}); at most "
                    f"{limits.relative:g} may be")
        if not self.sqnr_db >= limits.sqnr_db:
            return f"its SQNR is {self.sqnr_db:.1f} dB; at least {limits.sqnr_db:g} dB are wanted"
        return ""


@dataclass(frozen=True)
class Verification:
    """The errors of every output, and the verdict."""
    oracle: str
    items: int
    precision: str
    outputs: tuple[OutputErrors, ...]
    together: tuple[OutputErrors, ...]      # the same items in a batch beside each alone, both by the engine

    @property
    def limits(self) -> Limits:
        return LIMITS[self.precision]

    @property
    def faults(self) -> tuple[str, ...]:
        """A line for each output that exceeds the limits of the precision."""
        limits = self.limits
        alone = [f"output '{errors.name}': {fault}" for errors in self.outputs if (fault := errors.fault(limits))]
        return (*alone, *(f"output '{errors.name}' of an item depends on what else is in its batch: {fault}"
                          for errors in self.together if (fault := errors.fault(limits))))

    @property
    def advice(self) -> str:
        """What to do about the faults."""
        return _ADVICE[self.precision]


def verify(plan: str | os.PathLike[str], model: str | os.PathLike[str], data: CalibrationData | None = None, *,
           shapes: Mapping[str, Sequence[Dim | None]] | None = None, constants: Mapping[str, Value] | None = None,
           pixels: Pixels | None = None,
           progress: Callable[[Iterable[Feed], bool], Iterable[Feed]] | None = None) -> Verification:
    """Run the plan file, and the ONNX file it was built from, on the same inputs: one item, and batches of three.

    data        items (calibration.open_calibration_data); None generates them, seeded
    shapes      what --shape gave the build
    constants   what --constant gave it
    pixels      what --uint8-input made of the image input
    progress    called with the feeds and whether they take seconds each; yields the feeds

    The model is run by ONNX Runtime where it is installed, else by the NumPy reference. Generated inputs look like
    nothing that an INT8 plan was calibrated on, so it is then compared with its own quantised graph.
    Raises EngineErrors about the plan, the model or the data.
    """
    engine = load_engine(plan)
    if isinstance(engine, ProgramEngine):
        context = engine.create_context()
        feed = {tensor.name: context.input(tensor.name) for tensor in engine.inputs}
        oracle = oracle_of(Path(model), shapes, constants)
        return verify_engine(engine, oracle, [item for item in data.limit(1)] if data else [feed],
                             _precision_of_program(engine.plan))
    graph = graph_at(engine.plan)
    precision = precision_of(engine.plan, graph)
    if data is None and engine.plan.precision == "int8":
        oracle = reference_of(graph) if engine.plan.open is None else reference_of_specialisations(engine.plan)
    else:
        oracle = oracle_of(Path(model), shapes, constants, keep_batch=bool(engine.max_batch), pixels=pixels,
                           plan=engine.plan)
    feeds = feeds_of(data, engine.max_batch) if data else [
        {**feed, **usual_values(engine)} for inputs in tested_inputs(engine)
        for feed in feeds_of(generated(inputs, graph, 1 + BATCHES * TOGETHER), engine.max_batch)]
    return verify_engine(engine, oracle, progress(feeds, oracle.slow) if progress else feeds, precision)


def tested_inputs(engine: Engine | OpenEngine) -> list[tuple[IoTensor, ...]]:
    """The inputs as they are tested: of open extents with the usual numbers, and with others that the plan takes."""
    if isinstance(engine, Engine):
        return [engine.inputs]
    found: list[tuple[IoTensor, ...]] = []
    usual = {name: number for name, number in engine.plan.extents.items() if isinstance(number, int)}
    bounds = engine.part.profiles[0] if engine.part.profiles else {name: (max(n // 2, 1), n, n)
                                                                   for name, n in usual.items()}
    for which in (1, 0, 2):
        extents = {name: bounds[name][which] for name in usual}
        inputs = tuple(IoTensor(io.name, io.dtype, tuple(extents.get(str(extent), extent) for extent in io.shape))
                       for io in engine.inputs)
        if inputs not in found and (extents == usual or engine.takes(extents)):
            found.append(inputs)
    return found


def usual_values(engine: AnyEngine) -> dict[str, Array]:
    """Of inputs whose values decide what is computed, those that the plan was built for."""
    return engine.usual_values() if isinstance(engine, OpenEngine) else {}


def verify_engine(engine: AnyEngine, oracle: Oracle, feeds: Iterable[Feed], precision: str) -> Verification:
    """The same for a loaded engine and an oracle, on feeds at hand.

    The items of a batch are also run each alone, unless the plan says that they depend on each other.
    """
    beside: dict[str, list[_Pair]] = {tensor.name: [] for tensor in engine.outputs}
    alone: dict[str, list[_Pair]] = {tensor.name: [] for tensor in engine.outputs}
    count = 0
    for feed in feeds:
        items, made, expected = _items(engine, feed), engine.run(feed), oracle.answer(feed)
        singles = [engine.run(single) for single in _singles(engine, feed, items)]
        count += items
        for tensor in engine.outputs:
            value = made[tensor.name]
            beside[tensor.name].append(_pair(tensor, expected[tensor.name], value, items))
            if tensor.batched and singles:
                whole = np.concatenate([single[tensor.name] for single in singles], tensor.batch_axis)
                alone[tensor.name].append(_pair(tensor, whole, value, items))
    return Verification(oracle.name, count, precision, tuple(_errors(name, pairs) for name, pairs in beside.items()),
                        tuple(_errors(name, pairs) for name, pairs in alone.items() if pairs))


def precision_of(plan: Plan, graph: Graph) -> str:
    """The coarsest arithmetic of the plan and its graph, by which it is judged; a model that quantises is in INT8, and
    one that holds float16 or bfloat16 rounds as those do."""
    if any(kind.quant for kind in graph.types.values()) or any(node.op in _QUANTISE for node in graph.nodes):
        return "int8"
    found = {node.precision for node in graph.nodes} if plan.precision == "best" else {plan.precision}
    dtypes = {kind.dtype.name for kind in graph.types.values()}
    return _coarsest(found | {precision for dtype, precision in (("float16", "fp16"), ("bfloat16", "bf16"))
                              if dtype in dtypes})


def _precision_of_program(plan: Plan) -> str:
    """The coarsest of its segments'."""
    assert plan.program is not None
    return _coarsest({precision_of(one, graph_at(one)) for segment in plan.program.segments for one in segment.plans})


def _coarsest(precisions: Set[str]) -> str:
    return next((precision for precision in ("int8", "bf16", "fp16") if precision in precisions), "fp32")


def feeds_of(data: CalibrationData, max_batch: int) -> list[Feed]:
    """One item, then batches of three: as many as the engine takes, if that is less."""
    first, *_ = data.limit(1)
    behind = data.every(1, start=1).limit(BATCHES * TOGETHER)
    if data.count == 1:
        return [first]
    return [first, *behind.batches(min(TOGETHER, max_batch or 1))]


# ---- one feed
@dataclass(frozen=True)
class _Pair:
    """What is expected and what came, [items, elements of one]; `wrong` says why there are none."""
    expected: Array
    value: Array
    floating: bool = True
    wrong: str = ""


def _items(engine: AnyEngine, feed: Feed) -> int:
    return next((len(feed[tensor.name]) for tensor in engine.inputs if tensor.batched), 1)


def _singles(engine: AnyEngine, feed: Feed, items: int) -> list[Feed]:
    """Each item of a batch alone; none where they depend on each other, or there is but one."""
    if items == 1 or engine.plan.dependence:
        return []
    batched = {tensor.name for tensor in engine.inputs if tensor.batched}
    return [{name: array[i:i + 1] if name in batched else array for name, array in feed.items()} for i in range(items)]


def _pair(tensor: IoTensor, expected: Array, value: Array, items: int) -> _Pair:
    expected, value = (_readable(array, tensor) for array in (expected, value))
    if expected.shape != value.shape or expected.dtype != value.dtype:
        return _Pair(expected, value, wrong=f"it is {value.dtype}{list(value.shape)}, and should be "
                                            f"{expected.dtype}{list(expected.shape)}")
    if tensor.batched:
        expected, value = (np.moveaxis(array, tensor.batch_axis, 0) for array in (expected, value))
    rows = items if tensor.batched else 1
    columns = expected.size // max(rows, 1)
    return _Pair(expected.reshape(rows, columns), value.reshape(rows, columns), expected.dtype.kind == "f")


def _readable(array: Array, tensor: IoTensor) -> Array:
    """What numpy lacks, or its bits as an engine gives them, as float32."""
    return as_named(array, tensor.dtype).astype(np.float32) if tensor.dtype in BITS else array


# ---- all feeds
def _errors(name: str, pairs: Sequence[_Pair]) -> OutputErrors:
    if wrong := next((pair.wrong for pair in pairs if pair.wrong), ""):
        return OutputErrors(name, wrong=wrong)
    expected, value = (np.concatenate([array.reshape(-1) for array in arrays])
                       for arrays in ([p.expected for p in pairs], [p.value for p in pairs]))
    same = (expected == value) | ((expected != expected) & (value != value))
    differing = 1.0 - float(same.mean()) if same.size else 0.0
    if not pairs[0].floating:
        return OutputErrors(name, differing=differing, floating=False)
    finite = np.isfinite(expected) & np.isfinite(value)
    odd = int((~finite & ~same).sum())
    if not finite.any():
        nothing = f"none of its {expected.size} values is finite: nothing can be compared; give typical inputs, --calib"
        return OutputErrors(name, odd=odd, wrong=nothing if expected.size else "")
    wide = np.where(finite, expected, 0).astype(np.float64)
    error = np.abs(np.where(finite, value, 0).astype(np.float64) - wide)
    seen, largest = wide[finite], float(error.max())
    range_ = float(seen.max() - seen.min()) or float(np.abs(seen).max()) or 1.0
    return OutputErrors(
        name, largest, largest / range_, float(error[finite].mean()), float(np.median(error[finite])),
        _item(pairs, int(error.argmax())), sqnr_db(expected[finite], value[finite]),
        cosine(expected[finite], value[finite]), odd, differing)


def _item(pairs: Sequence[_Pair], element: int) -> int:
    """The item that the element belongs to; items of different shapes have different numbers of elements."""
    first = 0
    for pair in pairs:
        if element < pair.value.size:
            return first + element // int(pair.value.shape[1])
        element -= pair.value.size
        first += len(pair.value)
    return first
