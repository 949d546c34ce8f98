"""Notes of the passes to the user: which nodes were left as they are, or changed notably, and why."""
from __future__ import annotations

from dataclasses import dataclass

from infer_server.engines.ir.graph import Node


@dataclass(frozen=True)
class Note:
    """One line of `build-engine -v`."""
    node: str       # an ONNX node name where there is one, else a tensor name
    what: str       # the pass or rule
    why: str

    def __str__(self) -> str:
        return f"{self.what} at {self.node}: {self.why}"


def note(log: list[Note] | None, node: Node, what: str, why: str) -> None:
    """Append a note to the log, if there is one and it lacks this note: rules run in rounds and repeat theirs."""
    entry = Note(label(node), what, why)
    if log is not None and entry not in log:
        log.append(entry)


def label(node: Node) -> str:
    """Return a name that the user knows: the last named ONNX node of the node's origin, else its first output."""
    return next((name for name in reversed(node.origin) if name), node.outputs[0])
