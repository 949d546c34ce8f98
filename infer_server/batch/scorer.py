"""Scorer: run a plan on batches of rows, as Spark, Ray Data and a loop hand them out.

    scorer = Scorer("model.plan", top_k=5)
    scorer(table)                                               # an Arrow table in, an Arrow table out
    dataset.map_batches(scorer, batch_format="pyarrow")         # Ray Data
    frame.mapInArrow(scorer.stream, schema)                     # Spark

Each process loads an engine once, at its first batch: a Scorer is pickled as its arguments.
"""
from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infer_server.batch.columns import Column, Encoded, Group, arrow, together, with_plain_lists
from infer_server.batch.frames import Frame, Output, frame_of
from infer_server.batch.model import Items, top_k
from infer_server.engines.errors import CalibrationError, ConfigError, InputError, did_you_mean
from infer_server.engines.loading import Description, describe, load_engine
from infer_server.engines.plan.plan import IoTensor

if TYPE_CHECKING:
    from infer_server.calibration.data.sources.images import PictureReader
    from infer_server.engines.preprocess import Preprocess
    from infer_server.engines.runtime.engine import Engine

ENGINES = 4         # number of engines that a process keeps


@lru_cache(ENGINES)
def _engine(plan: str, changed_ns: int, threads: int) -> Engine:
    """Load a plan once in a process; `changed_ns` is the time of the file."""
    return load_engine(plan, threads, specialise="wait")


class Scorer:
    """A plan that scores batches of rows; the result has the batch's type.

    An input is read from the column of its name: numbers, lists of numbers, tensors, or encoded pictures in binary
    columns. A flat list is reshaped to the input's shape. Outputs become columns of their names; other columns are
    kept.

    Rows that cannot be scored are an InputError, or left out with `skip_bad`.
    """

    def __init__(self, plan: str | os.PathLike[str], *, threads: int = 1, batch: int = 0,
                 inputs: Mapping[str, str] | None = None, outputs: Mapping[str, str] | Sequence[str] | None = None,
                 columns: Sequence[str] | None = None, preprocess: str | Path | Preprocess = "", top_k: int = 0,
                 labels: Sequence[str] = (), skip_bad: bool = False) -> None:
        """Read the plan's description.

        Parameters
        ----------
        plan : path
            Plan file, which each process that scores must be able to read.
        threads : int
            Threads of the engine.
        batch : int
            Maximum number of items of an execution; 0: what the plan was built for.
        inputs : mapping of str to str, optional
            Columns of inputs that have another name: {input: column}.
        outputs : mapping or sequence of str, optional
            Outputs to keep, or {output: column}; None: all.
        columns : sequence of str, optional
            Columns of the batch to keep; None: all but those of the inputs.
        preprocess : str, Path or Preprocess
            Preprocessing of encoded pictures; "": what the plan was calibrated with, or a preset by its channels.
        top_k : int
            Replace each output by its `top_k` largest elements: columns OUTPUT_index, OUTPUT_score and, with labels,
            OUTPUT_label.
        labels : sequence of str
            Names of the classes, for top_k.
        skip_bad : bool
            Leave rows out that cannot be scored.

        Raises
        ------
        ConfigError
            A name is unknown, or options contradict each other.
        PlanCorruptError, PlanVersionError, OSError
            The plan cannot be read.
        """
        self.plan, self.threads, self.skip_bad, self.columns = str(plan), threads, skip_bad, columns
        self.described: Description = describe(plan)
        self.batch = batch or self.described.max_batch or 1
        self.inputs = _renamed({io.name: io.name for io in self.described.inputs}, inputs or {}, "input")
        names = {io.name: io.name for io in self.described.outputs}
        chosen = outputs if isinstance(outputs, Mapping) else {name: name for name in outputs or ()}
        self.outputs = {name: _renamed(names, chosen, "output")[name] for name in chosen or names}
        self.preprocess, self.top_k, self.labels = preprocess, top_k, tuple(labels)
        self.items = Items.of(self.described, self.batch)
        self.engine_seconds = 0.0       # time in the engine so far, in this process
        self._reader: PictureReader | None = None
        self._check_top_k()

    def __call__(self, batch: Any) -> Any:
        """Score a batch.

        Parameters
        ----------
        batch
            Arrow table or record batch, pandas DataFrame, or {column: array with a row for each item}.

        Returns
        -------
        batch of the same type
            The columns that are kept and the outputs, a row for each item.

        Raises
        ------
        InputError
            A column is missing or does not fit the model, or a row cannot be scored.
        """
        scored, bad = self.score(batch)
        if bad and not self.skip_bad:
            row, why = next(iter(sorted(bad.items())))
            raise InputError(f"row {row} of {len(bad)} that cannot be scored: {why}")
        return scored

    def stream(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the scored batches, for Spark's mapInArrow and mapInPandas.

        Fixed-size lists of record batches become lists, since Spark reads no others.
        """
        for batch in batches:
            scored = self(batch)
            yield with_plain_lists(scored) if hasattr(scored, "num_rows") else scored

    def score(self, batch: Any) -> tuple[Any, dict[int, str]]:
        """Return the scored rows of a batch, and {row: reason} of the others. Raises InputError."""
        frame = frame_of(batch)
        keep = self.kept(frame.names)
        bad = dict[int, str]()
        columns = [self._column(frame, io, bad) for io in self.described.inputs]
        results: dict[str, list[Group]] = {name: [] for name in self.outputs}
        for rows, values in together(columns):
            fitted = self.items.fit(values)
            if isinstance(fitted, str):
                bad |= {int(row): fitted for row in rows}
                continue
            begin = time.perf_counter()
            outputs = self.items.run(_engine(self.plan, os.stat(self.plan).st_mtime_ns, self.threads), fitted)
            self.engine_seconds += time.perf_counter() - begin
            for name, groups in results.items():
                groups.append(Group(rows, outputs[name]))
        good = None if not bad else np.setdiff1d(np.arange(frame.rows), np.fromiter(bad, np.int64))
        return frame.scored(keep, good, self._named(results)), bad

    def kept(self, names: Sequence[str]) -> list[str]:
        """Return the columns of a batch that are kept. Raises InputError if one is missing or named like an output."""
        columns = [name for name in names if name not in self.inputs.values()] if self.columns is None else self.columns
        if missing := [name for name in (*self.inputs.values(), *columns) if name not in names]:
            raise InputError(f"there is no column '{missing[0]}'{did_you_mean(missing[0], names)}; `inputs` names the "
                             "columns of inputs")
        if twice := set(columns) & set(self._named({})):
            raise InputError(f"column '{min(twice)}' is kept and named like an output; name the output's column by "
                             "`outputs`")
        return list(columns)

    def schema(self, schema: Any) -> Any:
        """Return the Arrow schema of the result for a batch of an Arrow schema. Raises InputError."""
        pa = arrow()
        return pa.schema([*(schema.field(name) for name in self.kept(schema.names)),
                          *(pa.field(name, output.arrow_type) for name, output in self._named({}).items())])

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the result, in addition to the plan, as JSON values."""
        preprocess = self.preprocess
        return {"inputs": self.inputs, "outputs": self.outputs, "columns": self.columns and list(self.columns),
                "batch": self.batch, "top_k": self.top_k, "labels": list(self.labels),
                "preprocess": str(preprocess) if isinstance(preprocess, str | Path) else preprocess.to_json()}

    def reader(self, files: Sequence[Path] = ()) -> PictureReader:
        """Return the reader of pictures for the model's only input; files: some whose bit depth is looked at.

        Raises CalibrationError or ConfigError if the model has no picture input.
        """
        from infer_server.calibration.data.sources.images import picture_reader
        from infer_server.engines.preprocess import Preprocess, load_preprocess
        declared = self.preprocess
        if isinstance(declared, str | Path):
            recorded = self.described.metadata.get("preprocess")
            preprocess = load_preprocess(declared) if declared else Preprocess.from_json(recorded) if recorded else None
        else:
            preprocess = declared
        if preprocess and self.described.inputs[0].dtype == "uint8":    # a plan of --uint8-input normalises by itself
            preprocess = preprocess.of_pixels
        return picture_reader(self.plan, files, self.described.inputs, preprocess)

    def _check_top_k(self) -> None:
        if self.labels and not self.top_k:
            raise ConfigError("labels name the classes of top_k; give top_k as well")
        for name in self.outputs if self.top_k else ():
            if (axes := len(self._output(name).shape)) != 1:
                raise ConfigError(f"top_k needs one score a class, but output '{name}' has {axes} axes an item; choose "
                                  "others by `outputs`")


    def _column(self, frame: Frame, io: IoTensor, bad: dict[int, str]) -> Column:
        name = self.inputs[io.name]
        column = frame.column(name)
        if not isinstance(column, Column):
            column = self._decoded(column)
        bad |= {row: f"column '{name}' {why}" for row, why in column.bad.items()}
        return column

    def _decoded(self, encoded: Encoded) -> Column:
        """Decode and preprocess pictures."""
        from infer_server.engines.preprocess import opened
        self._reader = self._reader or self.reader()
        column, items, rows = Column(len(encoded)), [], []
        for row, data in enumerate(encoded):
            try:
                if data is None:
                    raise ValueError("it is null")
                items.append(self._reader.item(opened(BytesIO(data)), f"row {row}"))
                rows.append(row)
            except (ValueError, CalibrationError) as error:
                column.bad[row] = f"cannot be read as an image: {error}"
        if items:
            column.groups = [Group(np.array(rows), np.concatenate(items))]
        return column

    def _output(self, name: str) -> Output:
        return self.items.outputs[name]

    def _named(self, results: Mapping[str, Sequence[Group]]) -> dict[str, Output]:
        """Return the columns of the outputs by name."""
        named = dict[str, Output]()
        for name, column in self.outputs.items():
            output = self._output(name)
            output = Output(output.dtype, output.shape, results.get(name, ()))
            named |= top_k(output, column, self.top_k, self.labels) if self.top_k else {column: output}
        return named

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None, "engine_seconds": 0.0}


def _renamed(names: Mapping[str, str], new: Mapping[str, str], kind: str) -> dict[str, str]:
    """Return {name: column}. Raises ConfigError for an unknown name."""
    for name in new:
        if name not in names:
            raise ConfigError(f"the model has no {kind} '{name}'{did_you_mean(name, names)}")
    return {**names, **new}
