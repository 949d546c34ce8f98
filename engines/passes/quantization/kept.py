"""Names of the nodes that a user keeps in float: --keep-float of build-engine, BuildConfig.keep_float.

    conv1               the ONNX node of that name
    head/*              every node whose name matches the pattern (fnmatch)
    conv1...            the node, or the nodes of a pattern, and all nodes that depend on their results
"""
from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from fnmatch import fnmatchcase

from infer_server.engines.errors import ConfigError
from infer_server.engines.ir.graph import Graph
from infer_server.engines.passes.rewriting.facts import ATTENTION, is_weighted

BEHIND = "..."


def kept_nodes(graph: Graph, keep_float: Collection[str]) -> frozenset[str]:
    """Return the names of the ONNX nodes of this graph that the entries of keep_float select."""
    return frozenset(name for entry in keep_float for name in _named(graph, entry))


def check_kept(graph: Graph, keep_float: Collection[str], quantised: bool = False) -> None:
    """Raise ConfigError for an entry of keep_float that would have no effect on an optimised graph.

    quantised: the model has Q/DQ nodes of its own, which decide how tensors are stored.
    """
    for entry in keep_float:
        if not (names := _named(graph, entry)):
            raise ConfigError(_unknown(graph.name, entry, _names(graph)))
        if quantised and not any(is_weighted(node) or node.op in (ATTENTION, "Recurrence")
                                 for node in graph.nodes if not names.isdisjoint(node.origin)):
            raise ConfigError(
                f"keep_float: '{entry}' is no convolution, matrix product or recurrent layer. {graph.name} is "
                "quantised already, and its own QuantizeLinear nodes say which other tensors are rounded: remove them "
                "from the model")


def check_names(model: str, names: Collection[str], keep_float: Collection[str]) -> None:
    """Raise ConfigError for an entry of keep_float that matches none of the names of a model's ONNX nodes."""
    for entry in keep_float:
        if entry not in names and not fitting_names(entry.removesuffix(BEHIND), names):
            raise ConfigError(_unknown(model, entry, names))


def _names(graph: Graph) -> set[str]:
    return {name for node in graph.nodes for name in node.origin}


def _named(graph: Graph, entry: str) -> set[str]:
    names = _names(graph)
    if entry in names:
        return {entry}
    first = fitting_names(entry.removesuffix(BEHIND), names)
    return _with_all_behind(graph, first) if entry.endswith(BEHIND) else first


def fitting_names(pattern: str, names: Collection[str]) -> set[str]:
    """Return the name equal to the pattern if there is one, else the names that match it."""
    return {pattern} if pattern in names else {name for name in names if fnmatchcase(name, pattern)}


def _with_all_behind(graph: Graph, first: Collection[str]) -> set[str]:
    """Return the names `first` and those of all nodes that depend on them."""
    made, names = set[str](), set(first)
    for node in graph.nodes:
        if not set(first).isdisjoint(node.origin) or not made.isdisjoint(node.inputs):
            made.update(node.outputs)
            names.update(node.origin)
    return names


def _unknown(model: str, entry: str, names: Collection[str]) -> str:
    """Return the error message for an entry that matches no node."""
    pattern = entry.removesuffix(BEHIND)
    if any(sign in pattern for sign in "*?["):
        return f"keep_float: no node of {model} has a name that fits '{pattern}'"
    near = get_close_matches(pattern, names, n=1)
    return (f"no node of {model} is called '{pattern}'" + (f"; did you mean '{near[0]}'?" if near else "")
            + " (keep_float takes names of ONNX nodes and patterns of them, '...' behind either for all that follows;"
              " a node that is computed at the build, or removed, leaves nothing to keep in float)")
