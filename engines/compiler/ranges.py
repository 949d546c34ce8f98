"""The interface by which a build asks for ranges of a model's edges, and for what is doubtful about the data.

calibration.Calibration implements it: the compiler does not know where ranges come from.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engines.compiler.subject import Subject
from engines.ir.graph import Array, Graph
from engines.ir.recipe import Recipe
from engines.plan.plan import IoTensor

Notify = Callable[[str], None]
Progress = Callable[[str, int, int, str], None]     # (stage, done, of, what): see build_engine


@dataclass(frozen=True)
class Calibrated:
    """The result of a calibration.

    recipe      how the model's tensors are quantised
    report      fields for the plan's metadata
    warnings    what is doubtful about the data or the result, a sentence each; they were notified, and the plan keeps
                them
    poor        the quantised model is too inexact to be used: "best" then builds in float
    """
    recipe: Recipe
    report: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    poor: bool = False


class RangeSource(Protocol):
    """Where an INT8 build takes its ranges from; calibration.Calibration is one."""

    @property
    def cache(self) -> str | os.PathLike[str]:
        """The file that `calibrate` keeps ranges in; "" if there is none."""

    def facts(self) -> Mapping[str, Any]:
        """All that changes the ranges beside the model and that file, as JSON would hold it."""

    def first(self, inputs: Sequence[IoTensor], pixels: bool) -> Mapping[str, Array] | None:
        """An item of the data; None: there are none. Raises EngineErrors about the data."""

    def calibrate(self, subject: Subject, notify: Notify, progress: Progress) -> Calibrated:
        """The ranges of the model's edges. Raises EngineErrors about the data."""

    def items(self, inputs: Sequence[IoTensor], most: int) -> Sequence[Mapping[str, Array]]:
        """The first items of the data. Raises EngineErrors about them."""

    def doubts(self, inputs: Sequence[IoTensor], feeds: Sequence[Mapping[str, Array]]) -> Sequence[str]:
        """Describe what cannot be right about the items, one sentence each."""

    def float16_doubts(self, graph: Graph, inputs: Sequence[IoTensor], pixels: bool) -> Sequence[str]:
        """Which tensors of a graph that is stored in float16 leave its range on the data, in a sentence."""

    def of(self, feeds: Sequence[Mapping[str, Array]]) -> RangeSource:
        """The same for other data: what a part of the model was fed."""
