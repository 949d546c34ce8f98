"""Summary of an engine or a build: some lines of text, or a table of HTML for notebooks."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

from infer_server.engines.plan.coverage import coverage_of
from infer_server.engines.plan.extents import text
from infer_server.engines.plan.plan import IoTensor, Plan

MOST = 6                # tensors, specialisations or notices that are listed
WIDTH = 100             # characters of a line


@dataclass(frozen=True)
class Summary:
    """Title and rows, each a label and its lines."""
    title: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]

    def text(self) -> str:
        """Return the summary as lines of text without a newline at the end."""
        indent = max(len(label) for label, _ in self.rows) + 4
        lines = [f"{f'  {label}' if not number else '':{indent}}{shortened(line, WIDTH - indent)}"
                 for label, texts in self.rows for number, line in enumerate(texts)]
        return "\n".join([f"<{shortened(self.title, WIDTH - 1)}", *lines]) + ">"

    def html(self) -> str:
        """Return the summary as a table of HTML."""
        rows = "".join(f'<tr><th style="text-align: left">{escape(label)}</th><td style="text-align: left">'
                       f"{'<br>'.join(map(escape, texts))}</td></tr>" for label, texts in self.rows)
        return f"<table><caption>{escape(self.title)}</caption>{rows}</table>"


class Summarised:
    """Base class of objects that Python prints, and notebooks show, by their summary."""

    def summary(self) -> Summary:
        """Return the rows to show."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.summary().text()

    def _repr_html_(self) -> str:
        return self.summary().html()


def summary(kind: str, plan: Plan, *rows: tuple[str, Sequence[str]]) -> Summary:
    """Return the summary of a plan under a title such as "Engine resnet50", with further rows at the end."""
    part = plan.open_part
    machine, times = plan.machine, sum(step.time_us for step in plan.machine.steps)
    specialised = [text(one.extents) for one in (plan, *part.others) if one.extents]
    constants = sum(len(one.machine.constants) for one in plan.within() if not one.machine.shared)
    found = [
        ("inputs", listed(list(map(tensor, part.inputs)))), ("outputs", listed(list(map(tensor, part.outputs)))),
        ("batch", [f"up to {plan.max_batch}" + ", items depend on each other" * bool(plan.dependence)]
         if plan.max_batch else []),
        ("specialised", listed(specialised)),
        ("steps", wrap(coverage_of(plan).line.removeprefix("coverage: "), WIDTH - 20)),
        ("time", [f"{times / 1e3:.3g} ms an item, as timed at the build"] if times else []),
        ("memory", [f"{constants / 1e6:.2f} MB of constants"]),
        *rows]
    return Summary(f"{kind} {plan.name}: {plan.precision} for {machine.target}",
                   tuple((label, tuple(texts)) for label, texts in found if texts))


def tensor(io: IoTensor) -> str:
    """Return name, dtype and shape: "input float32 [batch, 3, 224, 224]"."""
    return f"{io.name} {io.dtype} [{', '.join(map(str, io.shape))}]"


def listed(texts: Sequence[str]) -> list[str]:
    """Return the first texts, and a line with the number of the others."""
    return [*texts[:MOST], *([f"and {len(texts) - MOST} more"] if len(texts) > MOST else [])]


def shortened(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[:width - 3]}..."
