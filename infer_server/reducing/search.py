"""Search for the smallest fragment of a model that fails as the complete model does.

1. Outputs: one output that fails alone, then a bisection for the shortest beginning of its nodes that fails.
2. Inputs: a bisection for the latest tensors that can be fed with recorded values.
3. Nodes: delta debugging (Zeller and Hildebrandt, IEEE TSE 28, 2002) removes the rest in ever smaller pieces; readers
   of a removed node get the recorded value.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from infer_server.reducing.fragments import Fragment, FragmentExtractor

T = TypeVar("T")
Fails = Callable[[Fragment], bool]
Stage = Callable[[str, int], None]      # called with the stage and the number of nodes left


class OutOfChecks(Exception):
    """The allowed number of checks is spent."""


class Search:
    """One search. `best` is the smallest fragment so far.

    Attributes
    ----------
    checks : int
        Number of checks that were run.
    """

    def __init__(self, model: FragmentExtractor, fails: Fails, max_checks: int, stage: Stage) -> None:
        """fails: returns True if a fragment fails as the complete model does."""
        self._model, self._check, self._most, self._stage = model, fails, max_checks, stage
        self._known: dict[Fragment, bool] = {}
        self.best, self.checks, self.complete = model.needed(model.whole), 0, False

    def run(self) -> Fragment:
        """Return the smallest fragment that was found to fail. The whole model must fail."""
        try:
            self._one_output()
            self._shortest_beginning()
            self._latest_inputs()
            self._fewest_nodes()
            self.complete = True
        except OutOfChecks:
            pass
        return self.best

    def _fails(self, fragment: Fragment) -> bool:
        """Return True if the fragment, or its form with inputs in place of constants, fails; it is the best then."""
        fragment = self._model.needed(fragment)
        forms = [fragment, replace(fragment, frozen=False)] if self._model.freezes(fragment) else [fragment]
        for form in forms:
            if form not in self._known:
                if self.checks >= self._most:
                    raise OutOfChecks
                self.checks += 1
                self._known[form] = self._check(form)
            if self._known[form]:
                self.best = form
                self._stage("", len(form.nodes))
                return True
        return False

    def _one_output(self) -> None:
        """Find the output with the fewest nodes that fails alone."""
        self._stage("outputs", len(self.best.nodes))
        whole = self.best
        if len(whole.outputs) > 1:
            alone = [self._model.needed(replace(whole, outputs=(name,))) for name in whole.outputs]
            any(self._fails(fragment) for fragment in sorted(alone, key=lambda one: len(one.nodes)))

    def _shortest_beginning(self) -> None:
        """Bisect for the shortest beginning that fails, then reduce its outputs."""
        nodes = self.best.nodes
        low, high = 0, len(nodes)       # nodes[:high] fails, nodes[:low] is not known to
        while high - low > 1:
            middle = (low + high) // 2
            fails = self._fails(Fragment(nodes[:middle], self._model.frontier(nodes[:middle])))
            low, high = (low, middle) if fails else (middle, high)
        last = self._model.outputs_of(nodes[high - 1]) if nodes else ()
        if not (last and self._fails(Fragment(nodes[:high], last))):
            self._remove(lambda: self.best.outputs, lambda left: replace(self.best, outputs=left, frozen=True))


    def _latest_inputs(self) -> None:
        """Bisect for the latest position before which all nodes can be replaced by their recorded results."""
        self._stage("inputs", len(self.best.nodes))
        whole = self.best
        low, high = 0, len(whole.nodes)         # nodes[low:] fails, nodes[high:] is not known to
        while high - low > 1:
            middle = (low + high) // 2
            fails = self._fails(replace(whole, nodes=whole.nodes[middle:], frozen=True))
            low, high = (middle, high) if fails else (low, middle)

    def _fewest_nodes(self) -> None:
        self._stage("nodes", len(self.best.nodes))
        self._remove(lambda: self.best.nodes, lambda left: replace(self.best, nodes=left, frozen=True))

    def _remove(self, items: Callable[[], tuple[T, ...]], having: Callable[[tuple[T, ...]], Fragment]) -> None:
        """Remove items of the best fragment in ever smaller pieces until no single one can be removed.

        items: returns those of the best fragment. having: returns the fragment with only these.
        """
        size = max(len(items()) // 2, 1)
        while len(items()) > 1:
            before = len(items())
            for piece in _pieces(items(), size):
                left = tuple(item for item in items() if item not in piece)
                if left and len(left) < len(items()):
                    self._fails(having(left))
            if size > 1:
                size //= 2
            elif len(items()) == before:
                return


def _pieces(items: Sequence[T], size: int) -> Iterator[frozenset[T]]:
    """Yield the items in pieces, the first ones first."""
    for first in range(0, len(items), size):
        yield frozenset(items[first:first + size])
