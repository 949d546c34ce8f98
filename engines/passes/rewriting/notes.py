"""What a pass tells the user: which node it left alone, or changed in a way worth knowing, and why."""
from __future__ import annotations

from dataclasses import dataclass

from engines.ir.graph import Node


@dataclass(frozen=True)
class Note:
    """One line of `build-engine -v`."""
    node: str       # an ONNX node name where there is one, else a tensor name
    what: str       # the pass or rule
    why: str

    def __str__(self) -> str:
        return f"{self.what} at {self.node}: {self.why}"


def note(log: list[Note] | None, node: Node, what: str, why: str) -> None:
    """Appends a note, if anybody listens; one that repeats (rules run in rounds) is kept once."""
    entry = Note(label(node), what, why)
    if log is not None and entry not in log:
        log.append(entry)


def label(node: Node) -> str:
    """How a user knows the node: the last ONNX node it stands for, or what it makes."""
    return next((name for name in reversed(node.origin) if name), node.outputs[0])
