"""Names of the nodes that a user keeps in float: --keep-float of build-engine, BuildConfig.keep_float.

    conv1               the ONNX node of that name
    head/*              every node whose name fits the pattern, as shells and fnmatch read it
    conv1...            the node, or the nodes of a pattern, and all that computes with their results
"""
from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from engines.errors import ConfigError
from engines.ir.graph import Graph

BEHIND = "..."


def kept_nodes(graph: Graph, keep_float: Collection[str]) -> frozenset[str]:
    """Return the names of the ONNX nodes that the entries of keep_float stand for.

    Raises ConfigError for an entry that fits no node which is left after optimisation.
    """
    kept: set[str] = set()
    for entry in keep_float:
        if not (names := _named(graph, entry)):
            raise ConfigError(_unknown(graph, entry))
        kept |= names
    return frozenset(kept)


def applicable(keep_float: Iterable[str], names: Collection[str]) -> tuple[str, ...]:
    """Return the entries that fit one of these names of ONNX nodes: for a part of a model."""
    return tuple(entry for entry in keep_float if _fitting(entry.removesuffix(BEHIND), names) or entry in names)


def _named(graph: Graph, entry: str) -> set[str]:
    names = {name for node in graph.nodes for name in node.origin}
    if entry in names:
        return {entry}
    first = _fitting(entry.removesuffix(BEHIND), names)
    return _with_all_behind(graph, first) if entry.endswith(BEHIND) else first


def _fitting(pattern: str, names: Collection[str]) -> set[str]:
    return {pattern} if pattern in names else {name for name in names if fnmatchcase(name, pattern)}


def _with_all_behind(graph: Graph, first: Collection[str]) -> set[str]:
    """Return the names of the nodes that read what the first ones, or others of them, make."""
    made, names = set[str](), set(first)
    for node in graph.nodes:
        if not set(first).isdisjoint(node.origin) or not made.isdisjoint(node.inputs):
            made.update(node.outputs)
            names.update(node.origin)
    return names


def _unknown(graph: Graph, entry: str) -> str:
    """Return the message for an entry that fits no node."""
    pattern, names = entry.removesuffix(BEHIND), [name for node in graph.nodes for name in node.origin]
    if any(sign in pattern for sign in "*?["):
        return f"keep_float: no node of {graph.name} has a name that fits '{pattern}'"
    near = get_close_matches(pattern, names, n=1)
    return (f"no node of {graph.name} is called '{pattern}'" + (f"; did you mean '{near[0]}'?" if near else "")
            + " (keep_float takes names of ONNX nodes and patterns of them, '...' behind either for all that follows;"
              " a node that is computed at the build, or removed, leaves nothing to keep in float)")
