"""Build of one workload in one precision, its comparison with ONNX Runtime, and its times against the peers.

Each part runs in its own process, so that memory which a large model keeps does not affect the next.

    python -m benchmarks.zoo.trial built NAME PRECISION FOLDER [by-cost]    # model, plan, Q/DQ model, facts
    python -m benchmarks.zoo.trial timed NAME PRECISION FOLDER PEER BUILD SECONDS TURNS      # adds the times of a peer
"""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx

from benchmarks.measure.cycles import Counter
from benchmarks.measure.measuring import WorkClock, interleaved
from benchmarks.runtimes.runtimes import LOADERS, OPENVINO, ORT, OURS, OnnxRuntime
from benchmarks.zoo.pictures import feeds_for
from benchmarks.zoo.workloads import WORKLOADS
from infer_server.calibration import Calibration
from infer_server.engines import build_engine
from infer_server.engines.compiler.build import EngineBuild
from infer_server.engines.compiler.specialise import graph_at
from infer_server.engines.errors import EngineError
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.ir.graph import Array

CALIBRATION_ITEMS = 4
SEED = 1000                 # seed of the compared and timed inputs; calibration uses seeds from 0 on
PEERS = (ORT, OPENVINO)
QDQ, FLOAT = "our Q/DQ", "fp32"
BUILDS = {"fp32": (FLOAT,), "int8": (QDQ, FLOAT)}       # models for other runtimes: our export with Q/DQ, the float one


@dataclass(frozen=True)
class PeerTimes:
    """Times of our plan and one build of a peer, in equally many turns, or the reason for a failure."""
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def ratios(self) -> list[float]:
        """Ratio of the peer's time to ours in each turn."""
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]


@dataclass(frozen=True)
class Facts:
    """Results of a trial. Times are of one inference by one thread, in `unit`, by peer and its build."""
    name: str
    precision: str
    failure: str = ""                       # reason if there is no engine
    build_seconds: float = 0.0
    by_cost: bool = False                   # tactics were not timed
    steps: int = 0
    by_reference: int = 0
    reference_share: float = 0.0            # share of the time
    operators: tuple[str, ...] = ()         # operators that run by reference
    error: float = 0.0                      # max |difference| / max |reference|, the maximum of all outputs
    sqnr_db: float = 0.0                    # the minimum of all outputs
    unit: str = ""
    beside: dict[str, dict[str, PeerTimes]] = field(default_factory=dict)   # by peer and build; only measured ones

    def timed(self, peer: str, kind: str, result: PeerTimes, unit: str = "") -> Facts:
        """Return these results with the result of a peer's build added."""
        builds = {**self.beside.get(peer, {}), kind: result}
        return replace(self, unit=unit or self.unit, beside={**self.beside, peer: builds})


class Folder:
    """Files of a trial."""

    def __init__(self, root: Path, name: str, precision: str) -> None:
        self.root, self.name, self.precision = root, name, precision
        self.model = root / f"{name}.onnx"
        self.plan, self.exported, self.facts = (root / f"{name}-{precision}.{suffix}"
                                                for suffix in ("plan", "onnx", "json"))

    def read(self) -> Facts | None:
        if not self.facts.exists():
            return None
        known = json.loads(self.facts.read_text())
        beside = {peer: {kind: PeerTimes(**turns) for kind, turns in builds.items()}
                  for peer, builds in known["beside"].items()}
        return Facts(**{**known, "operators": tuple(known["operators"]), "beside": beside})

    def write(self, facts: Facts) -> None:
        self.facts.write_text(json.dumps(asdict(facts), indent=1))

    def feed(self, seed: int = SEED) -> dict[str, Array]:
        return feeds_for(onnx.load(self.model, load_external_data=False), 1, seed)


def build(name: str, precision: str, folder: Folder, by_cost: bool) -> Facts:
    if not folder.model.exists():
        onnx.save(WORKLOADS[name].full(), folder.model)
    begin = time.perf_counter()
    try:
        built = _built(precision, folder, by_cost)
    except EngineError as refusal:
        return Facts(name, precision, failure=str(refusal).splitlines()[0])
    seconds, coverage = time.perf_counter() - begin, built.coverage
    built.save(folder.plan)
    if precision == "int8":
        try:
            onnx.save(onnx_from_graph(graph_at(built.plan)), folder.exported)
        except (EngineError, ValueError) as reason:     # ValueError: more than an ONNX file may hold
            print(f"{name}: no Q/DQ model: {reason}", file=sys.stderr)
    feed = folder.feed()
    reference = OnnxRuntime(folder.model, feed, "fp32", 1)
    reference.infer()
    error, decibels = compared(reference.outputs(), list(built.engine().run(feed).values()))
    return Facts(name, precision, "", seconds, by_cost, coverage.steps, len(coverage.by_reference),
                 coverage.reference_share, tuple(sorted({step.operator for step in coverage.by_reference})), error,
                 decibels)


def _built(precision: str, folder: Folder, by_cost: bool) -> EngineBuild:
    calibration = None
    if precision == "int8":
        items = [folder.feed(seed) for seed in range(CALIBRATION_ITEMS)]
        calibration = Calibration(items, calibrator="minmax")
    batched = any(d.dim_param for value in onnx.load(folder.model, load_external_data=False).graph.input
                  for d in value.type.tensor_type.shape.dim[:1])
    return build_engine(folder.model, precision=precision, calibration=calibration, cache=False, timing=not by_cost,
                        max_batch=1 if batched else None, notify=lambda text: print(text, file=sys.stderr))


def compared(expected: Sequence[Array], actual: Sequence[Array]) -> tuple[float, float]:
    """Return the largest relative error and the least SQNR in dB of all outputs, or (inf, -inf) if shapes differ.

    The error of integer outputs (indices of selected boxes) is the share of expected rows that were not found, in any
    order, because boxes with equal scores have none.
    """
    errors, decibels = [0.0], [np.inf]
    for a, b in zip(expected, actual, strict=True):
        if a.shape != b.shape:
            return np.inf, -np.inf
        if a.dtype.kind == "i":
            ours = set(map(tuple, b.reshape(-1, b.shape[-1]).tolist()))
            errors.append(float(np.mean([tuple(row) not in ours for row in a.reshape(-1, a.shape[-1]).tolist()])))
            continue
        signal, noise = np.square(a, dtype=np.float64).sum(), np.square(a - b, dtype=np.float64).sum()
        errors.append(float(np.abs(a - b).max(initial=0) / max(np.abs(a).max(initial=0), 1e-30)))
        decibels.append(float(10 * np.log10(max(signal, 1e-30) / max(noise, 1e-30))))
    return max(errors), min(decibels)


def timed(facts: Facts, folder: Folder, peer: str, kind: str, seconds: float, turns: int) -> Facts:
    """Measure our plan and one build of a peer in turns, and return the facts with their times."""
    model = folder.exported if kind == QDQ else folder.model
    if not model.exists():
        return facts.timed(peer, kind, PeerTimes(failure="no Q/DQ model"))
    feed, clock = folder.feed(), WorkClock(Counter())
    try:
        sessions = {peer: LOADERS[peer](model, feed, "fp32" if kind == FLOAT else facts.precision, 1),
                    OURS: LOADERS[OURS](folder.plan, feed, facts.precision, 1)}
        costs = interleaved(clock, {runtime: session.infer for runtime, session in sessions.items()}, seconds, turns)
    except Exception as error:      # any error by which a runtime rejects a model
        print(f"{facts.name}: {peer}, {kind}: {error}", file=sys.stderr)
        return facts.timed(peer, kind, PeerTimes(failure=f"ended in {type(error).__name__}"))
    return facts.timed(peer, kind, PeerTimes(costs[OURS], costs[peer]), clock.unit)


def main(arguments: Sequence[str]) -> None:
    verb, name, precision, root, *more = arguments
    folder = Folder(Path(root), name, precision)
    known = folder.read()
    if verb == "built":
        folder.write(build(name, precision, folder, "by-cost" in more))
    elif known and not known.failure:
        peer, kind, seconds, turns = more
        folder.write(timed(known, folder, peer, kind, float(seconds), int(turns)))


if __name__ == "__main__":
    main(sys.argv[1:])
