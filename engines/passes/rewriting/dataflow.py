"""Recursive questions about tensors, answered in time linear in the nodes of the graph.

    @dataflow
    def never_negative(graph, name):
        node = graph.producer.get(name)
        if node is not None and node.op == "Add":
            return (yield node.inputs[0]) and (yield node.inputs[1])
        return node is not None and node.op == "Relu"

    never_negative(graph, "y")      # bool

The definition is a generator that yields each tensor whose answer it needs. The decorator keeps a stack of generators
instead of recursing, so a chain may be longer than Python's recursion limit, and it stores each answer with the graph,
so a tensor that is reached along 2**n paths (n times x * sigmoid(x)) is visited once.
"""
from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from infer_server.engines.ir.graph import Graph

T = TypeVar("T")
Walk = Generator[str, Any, T]       # yields names of tensors, receives their answers, returns its own


def dataflow(definition: Callable[[Graph, str], Walk[T]]) -> Callable[[Graph, str], T]:
    """Turn a recursive definition, written as a generator, into a function of (graph, tensor name).

    Parameters
    ----------
    definition : callable
        Takes the graph and a tensor's name; yields the names of tensors whose answers it needs and returns the answer
        for its own. It must depend on the graph and the name only, and tensors must not depend on each other in a
        circle.

    Returns
    -------
    callable
        The function; answers are stored in ``Graph.answers``.
    """
    def answer(graph: Graph, name: str) -> T:
        known: dict[str, T] = graph.answers.setdefault(definition, {})
        stack: list[tuple[str, Walk[T]]] = []
        needed, received = name, None
        while True:
            if needed in known:
                received = known[needed]
                if not stack:
                    return received
            else:
                stack.append((needed, definition(graph, needed)))
                received = None
            needed = _advance(stack, known, received)

    return answer


def _advance(stack: list[tuple[str, Walk[T]]], known: dict[str, T], received: T | None) -> str:
    """Send an answer to the topmost generator and return the next tensor to look up: one it needs, or its own."""
    name, walk = stack[-1]
    try:
        return walk.send(received)
    except StopIteration as end:
        stack.pop()
        known[name] = end.value
        return name
