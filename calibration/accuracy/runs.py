"""Collection of expected and computed outputs of several runs, and their errors over all runs."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from infer_server.calibration.accuracy.errors import (
    ErrorLimits,
    OutputErrors,
    Pair,
    errors_of,
    errors_of_parts,
    pair_of,
)
from infer_server.calibration.accuracy.rows import decided_rows, match_rows
from infer_server.calibration.accuracy.sources import Sources
from infer_server.calibration.accuracy.structure import Inner, Structure
from infer_server.engines.ir.graph import BATCH, Array
from infer_server.engines.plan.plan import IoTensor


class ComparedRuns:
    """Expected and computed outputs of several runs."""

    def __init__(self, outputs: Sequence[IoTensor], structure: Structure, limits: ErrorLimits) -> None:
        self._outputs, self._structure, self._limits = outputs, structure, limits
        self._pairs: dict[str, list[Pair]] = {}
        self._traced: dict[str, list[tuple[Pair, Sources]]] = {}       # by output, for runs whose shapes have a graph

    def add(self, computed: Mapping[str, Array], expected: Mapping[str, Array], inner: Inner | None = None) -> None:
        """Add a run; outputs that are not in `expected` are ignored.

        inner: tensors before selections, computed by the engine's graph, and the sources of elements.
        """
        pairs = {io.name: pair_of(io, expected[io.name], computed[io.name], io.name in self._structure.selections)
                 for io in self._outputs if io.name in expected}
        selections = self._structure.selections
        decided = decided_rows([(pair.expected, selections[name]) for name, pair in pairs.items()
                                if name in selections and not pair.wrong], self._limits.rows)
        for name, pair in pairs.items():
            selection = selections.get(name)
            if selection and not pair.wrong and (selection.ordered or pair.floating):
                match = match_rows(pair.expected, pair.value, selection, self._limits.rows, decided)
                pair = replace(pair, value=match.value, measured=match.matched, rows=match.rows, missing=match.missing)
            self._keep(name, pair, inner)
        for name, value in inner.values.items() if inner else ():
            if name in expected and expected[name].shape == value.shape:
                io = IoTensor(name, value.dtype.name, (BATCH, *value.shape[1:]))
                self._keep(name, pair_of(io, np.asarray(expected[name], value.dtype), value), inner)

    def _keep(self, name: str, pair: Pair, inner: Inner | None) -> None:
        self._pairs.setdefault(name, []).append(pair)
        if inner and name in inner.sources:
            sources = inner.sources[name]
            labels = sources.labels if sources.labels.ndim == pair.expected.ndim else sources.labels[None]
            axis = next((io.batch_axis for io in self._outputs if io.name == name), 0)
            moved = replace(sources, labels=np.moveaxis(labels, axis, 0))
            self._traced.setdefault(name, []).append((pair, moved))

    def outputs(self) -> tuple[OutputErrors, ...]:
        """Return the errors of each output as a whole."""
        return tuple(errors_of(io.name, self._pairs[io.name]) for io in self._outputs if io.name in self._pairs)

    def parts(self) -> tuple[OutputErrors, ...]:
        """Return the errors of the parts of outputs, and of the inputs of selections and their parts."""
        names = {io.name for io in self._outputs}
        errors: list[OutputErrors] = []
        for name, pairs in self._pairs.items():
            if name not in names:
                errors.append(replace(errors_of(name, pairs), name=f"{name}, before a selection"))
            traced = self._traced.get(name, ())
            errors += errors_of_parts(name, [pair for pair, _ in traced], [sources for _, sources in traced])
        return tuple(errors)
