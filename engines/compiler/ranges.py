"""Interface by which a build obtains ranges of a model's tensors and checks of the calibration data.

infer_server.Calibration implements it; the compiler does not depend on the calibration package.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from infer_server.engines.compiler.builder import BuildConfig
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.frontend.onnx_file import OnnxModel
from infer_server.engines.frontend.weight_only.layers import Layer, Rounder
from infer_server.engines.ir.graph import Array, Graph
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.plan.plan import IoTensor

Notify = Callable[[str], None]
Progress = Callable[[str, int, int, str], None]     # (stage, done, of, what): see build_engine


@dataclass(frozen=True)
class Calibrated:
    """The result of a calibration.

    recipe      how the model's tensors are quantised
    report      fields for the plan's metadata
    warnings    warnings about the data or the result, a sentence each; the user was notified, and the plan keeps them
    poor        True if the quantised model is too inexact: "best" then builds in float
    keep_float  ONNX nodes to keep in float beside those that the options name
    float_type  their precision; "" leaves it to the options
    keep_fp32   those of them that compute in float32 in any case
    """
    recipe: Recipe
    report: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    poor: bool = False
    keep_float: tuple[str, ...] = ()
    float_type: str = ""
    keep_fp32: tuple[str, ...] = ()


class RangeSource(Protocol):
    """Interface of a source of quantisation ranges: infer_server.Calibration."""

    @property
    def cache(self) -> str | os.PathLike[str]:
        """File in which `calibrate` keeps ranges; "" if there is none."""

    def facts(self) -> Mapping[str, Any]:
        """Return all that affects the ranges except the model and that file, as JSON values."""

    def first(self, inputs: Sequence[IoTensor], pixels: bool) -> Mapping[str, Array] | None:
        """Return an item of the data, or None without data. Raises EngineErrors about the data."""

    def calibrate(self, subject: Subject, notify: Notify, progress: Progress) -> Calibrated:
        """Determine the ranges of the model's tensors. Raises EngineErrors about the data."""

    def rounder(self, source: OnnxModel, config: BuildConfig, layers: Sequence[Layer], notify: Notify,
                progress: Progress) -> Rounder:
        """Return how the weights of these layers are rounded in a weight-only build. Raises EngineErrors."""

    def items(self, inputs: Sequence[IoTensor], most: int) -> Sequence[Mapping[str, Array]]:
        """Return the first items of the data, at most `most`. Raises EngineErrors about the data."""

    def warnings(self, inputs: Sequence[IoTensor], feeds: Sequence[Mapping[str, Array]]) -> Sequence[str]:
        """Return warnings about implausible items, one sentence each."""

    def float16_warnings(self, graph: Graph, inputs: Sequence[IoTensor], pixels: bool) -> Sequence[str]:
        """Return warnings about tensors of a float16 graph that exceed its range on the data."""

    def of(self, feeds: Sequence[Mapping[str, Array]]) -> RangeSource:
        """Return a source with these settings for other data: the recorded inputs of a segment."""
