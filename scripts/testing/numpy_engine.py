"""Small engines in numpy with known results and durations, loaded through the server's engine interface.

A plan is a JSON file, e.g. {"kind": "affine", "shape": [4], "max_batch": 8, "seconds": 0.01}.
"""
from __future__ import annotations

import json
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.errors import PlanCorruptError
from infer_server.repository import checking

TIMEOUT_SECS = 120          # time limit of everything a test waits for; longer means a hang, even on a busy machine


class Gate:
    """Gate that blocks executions while it is closed, so that a test controls which ones proceed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._waiting = 0
        self._passes = 0
        self.waiting_items = 0          # items of the blocked executions

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._set(True)
        try:
            yield
        finally:
            self._set(False)

    def enter(self, items: int) -> None:
        with self._changed:
            self._waiting += 1
            self.waiting_items += items
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self._closed or self._passes > 0, TIMEOUT_SECS)
            self._passes = max(0, self._passes - 1)
            self._waiting -= 1
            self.waiting_items -= items

    def let_one_through(self) -> None:
        """Let one blocked execution continue; the gate stays closed for the others."""
        with self._changed:
            self._passes += 1
            self._changed.notify_all()

    def holds(self, count: int) -> bool:
        """Return True if `count` executions are blocked, now or within a test's time limit."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting == count, TIMEOUT_SECS)

    def _set(self, closed: bool) -> None:
        with self._changed:
            self._closed = closed
            self._changed.notify_all()


CONTEXTS: weakref.WeakSet[NumpyContext] = weakref.WeakSet()        # contexts whose memory is still held
GATES: defaultdict[str, Gate] = defaultdict(Gate)


@dataclass(frozen=True)
class NumpyTensor:
    name: str
    dtype: str
    shape: tuple[int | str, ...]


class NumpyContext:
    def __init__(self, engine: NumpyEngine) -> None:
        self._engine = engine
        CONTEXTS.add(self)
        self._inputs = {tensor.name: engine.slots(tensor) for tensor in engine.inputs}
        self._outputs = {tensor.name: engine.slots(tensor) for tensor in engine.outputs}

    def input(self, name: str, batch: int) -> NDArray[Any]:
        return self._inputs[name][:batch] if self._engine.max_batch else self._inputs[name]

    def execute(self, batch: int) -> None:
        if batch > max(1, self._engine.max_batch):
            raise ValueError(f"batch {batch} does not fit")
        if self._engine.seconds:
            time.sleep(self._engine.seconds)
        if self._engine.gate:
            GATES[self._engine.gate].enter(batch)
        first = next(iter(self._inputs.values()))
        if self._engine.kind == "fails_on_negative" and (first[:batch] < 0).any():
            raise ArithmeticError("a negative value")
        self._outputs["y"][...] = first if self._engine.kind == "echo" else first * 2 + 1
        if self._engine.kind == "two":
            self._outputs["sum"][...] = first + self._inputs["x2"]

    def output(self, name: str, batch: int) -> NDArray[Any]:
        return self._outputs[name][:batch] if self._engine.max_batch else self._outputs[name]

    def close(self) -> None:
        """Do nothing."""


@dataclass
class NumpyEngine:
    """Engine that computes y = 2x + 1.

    kind "echo": y = x; kind "two" has a second input x2 and a second output sum = x + x2.
    """
    kind: str = "affine"
    shape: tuple[int, ...] = (4,)
    dtype: str = "float32"
    max_batch: int = 8
    precision: str = "fp32"
    seconds: float = 0.0
    gate: str = ""              # the name of one in GATES
    dependence: str = ""
    deciding: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def is_steady(self) -> bool:
        return not (self.gate or self.seconds)

    @property
    def inputs(self) -> list[NumpyTensor]:
        return [self._tensor(name) for name in (("x", "x2") if self.kind == "two" else ("x",))]

    @property
    def outputs(self) -> list[NumpyTensor]:
        return [self._tensor(name) for name in (("y", "sum") if self.kind == "two" else ("y",))]

    def slots(self, tensor: NumpyTensor) -> NDArray[Any]:
        return np.zeros((self.max_batch, *self.shape) if self.max_batch else self.shape, tensor.dtype)

    threads = 1
    arena_bytes = 0

    def create_context(self, cpus: Sequence[int] | None = None) -> NumpyContext:
        return NumpyContext(self)

    def _tensor(self, name: str) -> NumpyTensor:
        return NumpyTensor(name, self.dtype, ("batch", *self.shape) if self.max_batch else self.shape)


def load_numpy_engine(path: Path, threads: int, specialise: str = "", gpu: int = 0) -> NumpyEngine:
    try:
        plan = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise PlanCorruptError(f"{path} is no plan: {error}") from error
    if plan.pop("crash", False):
        raise ZeroDivisionError("a loader's bug")
    return NumpyEngine(**{**plan, "shape": tuple(plan.get("shape", (4,)))})


def write_model(repository: Path, name: str, version: int = 1, config: str = "", **plan: Any) -> Path:
    """Write a model into a repository and return its folder; `plan` are the fields of NumpyEngine."""
    folder = repository / name
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / str(version) / "model.plan").write_text(json.dumps(plan))
    if config:
        (folder / "config.pbtxt").write_text(config)
    return folder


check = partial(checking.check, describe=partial(load_numpy_engine, threads=1))       # of repositories of these plans
