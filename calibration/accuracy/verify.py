"""Verification: compare an engine's outputs with the expected ones, and judge them by the limits of its precision.

    verification = verify("m.plan", "m.onnx")
    print(verification)
    verification.faults                     # () if every output is within its limits
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from infer_server.calibration.accuracy.errors import LIMITS, ErrorLimits, OutputErrors
from infer_server.calibration.accuracy.oracle import Oracle, oracle_of, reference_of, reference_of_specialisations
from infer_server.calibration.accuracy.overflow import overflow
from infer_server.calibration.accuracy.runs import ComparedRuns
from infer_server.calibration.accuracy.structure import Structure, structure_of, structure_of_program, tensor_names
from infer_server.calibration.data.checks import DataCheck
from infer_server.calibration.data.generated import SEED, generated
from infer_server.calibration.data.items import CalibrationData, Feed
from infer_server.engines.compiler.specialise import graph_at
from infer_server.engines.errors import EngineError, InputError, PlanError
from infer_server.engines.frontend.inputs import Value
from infer_server.engines.ir.graph import Dim, Graph
from infer_server.engines.ir.recipe import Pixels
from infer_server.engines.loading import load_engine
from infer_server.engines.plan.extents import Extents
from infer_server.engines.plan.plan import IoTensor, Plan
from infer_server.engines.runtime.engine import Engine

TOGETHER = 3            # items of a batch
BATCHES = 4             # maximum number of batches
_QUANTISE = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})


_ADVICE = {
    "fp32": "float32 leaves no room for that: it is a fault of the compiler, to be reported with the model, or the "
            "model makes much of the last bits of its sums on these inputs: give typical ones, --calib",
    "fp16": "build with --fp32 --verify: if that passes, the model needs more than float16 has",
    "bf16": "build with --fp32 --verify: if that passes, the model needs more than bfloat16 has",
    "int8": "build with --fp32 --verify: if that passes, quantisation is what costs it: calibrate on more and typical "
            "data, check --preprocess, or leave nodes in float with --keep-float",
    "weight-only": "build without --weight-only, with --verify: if that passes, rounding the weights is what costs it: "
                   "give --calib, take smaller groups or --weight-only int8, or leave nodes in float with --keep-float",
}


@dataclass(frozen=True)
class Verification:
    """Errors of every output, and the verdict.

    outputs     errors of whole outputs; after a selection, of the rows that match
    parts       errors of parts of outputs, and of the inputs of selections
    together    differences between items in a batch and alone, both computed by the engine
    notes       warnings about the items or their effect on the plan, a sentence each
    """
    oracle: str
    items: int
    precision: str
    outputs: tuple[OutputErrors, ...]
    together: tuple[OutputErrors, ...]
    parts: tuple[OutputErrors, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def limits(self) -> ErrorLimits:
        return LIMITS[self.precision]

    @property
    def faults(self) -> tuple[str, ...]:
        """Messages, one for each output that exceeds the limits of the precision."""
        limits = self.limits
        alone = [f"output '{errors.name}': {fault}" for errors in (*self.outputs, *self.parts)
                 if (fault := errors.fault(limits))]
        return (*alone, *(f"output '{errors.name}' of an item depends on what else is in its batch: {fault}"
                          for errors in self.together if (fault := errors.fault(limits))))

    @property
    def worst(self) -> str:
        """Name the part with the least SQNR; "" where no output is judged in parts."""
        return min(self.parts, key=lambda part: part.sqnr_db).name if self.parts else ""

    @property
    def advice(self) -> str:
        """Advice on how to correct the faults."""
        return _ADVICE[self.precision]


def verify(plan: str | os.PathLike[str], model: str | os.PathLike[str], data: CalibrationData | None = None, *,
           shapes: Mapping[str, Sequence[Dim | None]] | None = None, constants: Mapping[str, Value] | None = None,
           pixels: Pixels | None = None,
           progress: Callable[[Iterable[Feed], bool], Iterable[Feed]] | None = None) -> Verification:
    """Compare a plan file with the ONNX file that it was built from: one item, and batches of three.

    The model runs on ONNX Runtime if that is installed, else on the NumPy reference. On generated inputs an INT8 plan
    is compared with its own quantised graph: it was not calibrated on such data.

    Parameters
    ----------
    plan, model
        The files.
    data
        Items (calibration.open_calibration_data); None generates them, seeded.
    shapes, constants
        What --shape and --constant gave the build.
    pixels
        What --uint8-input made of the image input.
    progress
        Called with the feeds and whether each takes seconds; yields the feeds.

    Returns
    -------
    Verification
        `faults` is empty if all outputs are within their limits.
    """
    engine = load_engine(plan)
    if engine.plan.program is not None:
        return _verify_program(engine, Path(model), oracle_of(Path(model), shapes, constants, plan=engine.plan), data)
    graph = graph_at(engine.plan)
    precision = _weight_only(engine.plan) or precision_of(engine.plan, graph)
    structure = structure_of(engine.plan, graph, tensor_names(Path(model)))
    if data is None and engine.plan.precision == "int8":
        oracle = reference_of(graph) if engine.plan.open is None else reference_of_specialisations(engine.plan)
    else:
        oracle = oracle_of(Path(model), shapes, constants, keep_batch=bool(engine.max_batch), pixels=pixels,
                           plan=engine.plan, shown=structure.tensors)
    feeds = feeds_of(data, engine.max_batch) if data else [
        {**feed, **engine.usual_values()} for inputs in tested_inputs(engine)
        for feed in feeds_of(generated(inputs, graph, 1 + BATCHES * TOGETHER), engine.max_batch)]
    verification = verify_engine(engine, oracle, progress(feeds, oracle.slow) if progress else feeds, precision,
                                 structure)
    notes = [*_faults(engine, feeds)] if data else []
    if engine.plan.precision == "fp16":
        notes += overflow(graph, [feed for feed in feeds if structure.fits(feed)])
    return replace(verification, notes=tuple(notes))


def _faults(engine: Engine, feeds: Iterable[Feed]) -> Iterator[str]:
    """Yield what is wrong with the items: zeros verify nothing."""
    check = DataCheck(engine.inputs)
    for feed in feeds:
        check.observe(feed)
    yield from check.faults()


def tested_inputs(engine: Engine) -> list[tuple[IoTensor, ...]]:
    """Return the declarations of the inputs to test: with the usual numbers for open extents, and with others."""
    tested: list[tuple[IoTensor, ...]] = []
    usual = {name: number for name, number in engine.plan.extents.items() if isinstance(number, int)}
    profiles = engine.plan.open_part.profiles
    bounds = profiles[0] if profiles else {name: (max(n // 2, 1), n, n) for name, n in usual.items()}
    for which in (1, 0, 2):
        extents = {name: bounds[name][which] for name in usual}
        inputs = tuple(IoTensor(io.name, io.dtype, tuple(extents.get(str(extent), extent) for extent in io.shape))
                       for io in engine.inputs)
        if inputs not in tested and (extents == usual or _takes(engine, extents)):
            tested.append(inputs)
    return tested


def _takes(engine: Engine, extents: Extents) -> bool:
    """Return True if the model can be specialised for these numbers and the usual values; it is then."""
    try:
        engine.at({io.name: io.shape_of(1, extents) for io in engine.inputs})
    except EngineError:
        return False
    return True


def _verify_program(engine: Engine, model: Path, oracle: Oracle, data: CalibrationData | None) -> Verification:
    """Verify a program, on likely inputs and on random ones like them if there are no data."""
    context = engine.create_context()
    likely = {tensor.name: np.array(context.input(tensor.name)) for tensor in engine.inputs}
    feeds = list(data.limit(BATCHES)) if data else [likely, *_random(engine, likely)]
    try:
        precision = _weight_only(engine.plan) or _precision_of_program(engine.plan)
        verification = verify_engine(engine, oracle, feeds, precision, structure_of_program(model))
        is_empty = all(errors.rows == 0 for errors in verification.outputs)
        return replace(verification, notes=(
            "no output has a row on these items, so nothing is compared; give some on which it has, "
            "--calib",) * is_empty)
    except PlanError as error:
        if data:
            raise
        raise InputError("the model takes none of the inputs that could be generated, so nothing is verified; give "
                         f"some, --calib: {error}") from error


def _random(engine: Engine, likely: Feed) -> Iterator[Feed]:
    """Yield inputs with normal numbers in place of constant floats, as far as the program takes them."""
    random = np.random.default_rng(SEED)
    constant = {name for name, array in likely.items()
                if array.dtype.kind == "f" and array.size and (array == array.flat[0]).all()}
    for _ in range(BATCHES - 1 if constant else 0):
        feed = {name: random.standard_normal(array.shape).astype(array.dtype) if name in constant else array
                for name, array in likely.items()}
        try:
            engine.run(feed)
        except EngineError:
            return
        yield feed


def verify_engine(engine: Engine, oracle: Oracle, feeds: Iterable[Feed], precision: str,
                  structure: Structure | None = None) -> Verification:
    """Verify a loaded engine by an oracle, on feeds at hand. structure: what is known of the model's outputs.

    The items of a batch are also run each alone, unless the plan says that they depend on each other.
    """
    structure = structure or Structure()
    runs = ComparedRuns(engine.outputs, structure, LIMITS[precision])
    alone = ComparedRuns(engine.outputs, structure, LIMITS[precision])
    count = 0
    for feed in feeds:
        items, actual, expected = _items(engine, feed), engine.run(feed), oracle.answer(feed)
        singles = [engine.run(single) for single in _singles(engine, feed, items)]
        count += items
        runs.add(actual, expected, structure.at(feed))
        if singles:
            batched = [tensor for tensor in engine.outputs if tensor.batched]
            alone.add(actual, {tensor.name: np.concatenate([single[tensor.name] for single in singles],
                                                         tensor.batch_axis) for tensor in batched})
    return Verification(oracle.name, count, precision, runs.outputs(), alone.outputs(), runs.parts())


def precision_of(plan: Plan, graph: Graph) -> str:
    """Return the coarsest precision of the plan and its graph, by whose limits it is judged.

    A model that quantises counts as int8, one with float16 or bfloat16 tensors as fp16 or bf16.
    """
    if any(kind.quant for kind in graph.types.values()) or any(node.op in _QUANTISE for node in graph.nodes):
        return "int8"
    precisions = {node.precision for node in graph.nodes} if plan.precision == "best" else {plan.precision}
    dtypes = {kind.dtype.name for kind in graph.types.values()}
    return _coarsest(precisions | {precision for dtype, precision in (("float16", "fp16"), ("bfloat16", "bf16"))
                              if dtype in dtypes})


def _weight_only(plan: Plan) -> str:
    """Return the name of the limits for a plan whose weights the build quantised; "" for other plans."""
    return "weight-only" if plan.metadata.get("weights") else ""


def _precision_of_program(plan: Plan) -> str:
    """Return the coarsest precision of a program's segments."""
    assert plan.program is not None
    return _coarsest({precision_of(one, graph_at(one)) for segment in plan.program.segments for one in segment.plans})


def _coarsest(precisions: Set[str]) -> str:
    return next((precision for precision in ("int8", "bf16", "fp16") if precision in precisions), "fp32")


def feeds_of(data: CalibrationData, max_batch: int) -> list[Feed]:
    """Return a feed of one item, then batches of TOGETHER items, or of max_batch if that is less."""
    first, *_ = data.limit(1)
    behind = data.every(1, start=1).limit(BATCHES * TOGETHER)
    if data.count == 1:
        return [first]
    return [first, *behind.batches(min(TOGETHER, max_batch or 1))]


# ---- one feed
def _items(engine: Engine, feed: Feed) -> int:
    return next((len(feed[tensor.name]) for tensor in engine.inputs if tensor.batched), 1)


def _singles(engine: Engine, feed: Feed, items: int) -> list[Feed]:
    """Return each item of a batch as a feed; none if items depend on each other or there is only one."""
    if items == 1 or engine.plan.dependence:
        return []
    batched = {tensor.name for tensor in engine.inputs if tensor.batched}
    return [{name: array[i:i + 1] if name in batched else array for name, array in feed.items()} for i in range(items)]
