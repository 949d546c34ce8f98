"""Second moments of what the products of a float model multiply their weights by, over calibration items.

    moments = ProductMoments(source, tensors, data_of, config, progress)
    moments.of("hidden")            # E[x x^T], [K, K], or None

The model runs with these tensors as further outputs. Matrices are held up to MOST_BYTES: a model with larger ones is
run over the data once for each share of its tensors, in the order in which they are read.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from infer_server.calibration.data.items import CalibrationData
from infer_server.calibration.data.padding import Padding
from infer_server.calibration.histogram import Floats
from infer_server.calibration.trials.judge import float_engines
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.ranges import Progress
from infer_server.engines.compiler.subject import Seen, Subject, read_subject
from infer_server.engines.errors import CompilerFault, ConfigError, EngineError
from infer_server.engines.frontend.onnx_file import OnnxModel
from infer_server.engines.frontend.weight_only.rewrite import showing
from infer_server.engines.ir.graph import Array

MOST_ITEMS = 128        # items that are read
ROWS = 128              # rows taken of each item, evenly spaced
LEAST_ROWS = 0.5        # least rows as a share of K: with fewer, rounding would fit these rows alone
MOST_BYTES = 1 << 30    # bytes of the matrices that are held


@dataclass
class _Sums:
    squares: Floats
    rows: int = 0

    def add(self, rows: Array) -> None:
        self.squares += rows.T @ rows
        self.rows += len(rows)


class ProductMoments:
    """Second moments of tensors, computed when they are first asked for."""

    def __init__(self, source: OnnxModel, tensors: Mapping[str, int], config: BuildConfig, seen: Seen,
                 data: Callable[[Subject], CalibrationData], progress: Progress) -> None:
        """Compile the float model.

        Parameters
        ----------
        source : OnnxModel
            The float model.
        tensors : mapping of str to int
            K by tensor, in the order in which they are asked for.
        config : BuildConfig
            The options of the build.
        seen : callable
            Returns the first item; see read_subject.
        data : callable
            Opens the items for the inputs of a model.
        progress : callable
            Called with ("calibrating", done, of, "").

        Raises
        ------
        ConfigError
            The model runs as a program, or cannot run with these outputs.
        """
        self._tensors, self._progress = dict(tensors), progress
        self._sums: dict[str, _Sums] = {}
        try:
            plain = replace(config, precision="fp32", weight_only=None, timing=False, keep_float=())
            self._subject = read_subject(Builder(plain), showing(source, tensors), seen)
            self._engines = float_engines(self._subject, ())
        except CompilerFault:
            raise
        except EngineError as error:
            raise ConfigError(f"{source.name}: what its products read cannot be observed, so --calib cannot decide how "
                              f"their weights are rounded; leave it out to round to the nearest ({error})") from error
        self._data = data(self._subject).limit(MOST_ITEMS)

    def of(self, tensor: str) -> Floats | None:
        """Return the second moments of a tensor, float64 [K, K]; None if too few rows are known, or they overflow."""
        if tensor not in self._sums:
            self._sums = {name: _Sums(np.zeros((depth, depth))) for name, depth in self._next(tensor)}
            self._run()
        found = self._sums[tensor]
        if found.rows < LEAST_ROWS * len(found.squares) or not np.isfinite(found.squares).all():
            return None
        return found.squares / found.rows

    def _next(self, tensor: str) -> Iterator[tuple[str, int]]:
        """Yield a tensor and those behind it whose matrices fit into MOST_BYTES together, with their K."""
        names, size = list(self._tensors), 0
        for name in names[names.index(tensor):]:
            size += 8 * self._tensors[name] ** 2
            if size > MOST_BYTES and name != tensor:
                return
            yield name, self._tensors[name]

    def _run(self) -> None:
        done, plan = 0, self._engines.usual.plan
        for feed in self._data.batches(1 if plan.dependence else plan.batch_slots):
            padding, items = Padding(feed), self._data.items_in(feed)

            def observe(name: str, values: Array, padding: Padding = padding, items: int = items) -> None:
                if (sums := self._sums.get(name)) is not None:
                    for item in padding.by_item(values, items):
                        sums.add(_spread(item.reshape(-1, len(sums.squares))))

            for name in feed.keys() & self._sums.keys():
                observe(name, feed[name])
            self._engines.show(feed, observe)
            done += items
            self._progress("calibrating", done, min(self._data.count or 0, MOST_ITEMS), "")


def _spread(rows: Array) -> Array:
    """Return at most ROWS rows, evenly spaced, in float32."""
    if len(rows) > ROWS:
        rows = rows[np.linspace(0, len(rows) - 1, ROWS).astype(np.intp)]
    return rows.astype(np.float32, copy=False)
