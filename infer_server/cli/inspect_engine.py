"""inspect-engine: show a plan: its kernels with fused nodes, precision, tactic and time.

    inspect-engine m.plan               times of the build, or expected times
    inspect-engine m.plan --profile     times measured now, with the bound of this core; largest gain first
    inspect-engine m.plan --report m.html       a page with all that the plan knows, and times measured now
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from infer_server.cli.common import guarded, positive, table
from infer_server.cli.profile import as_json, header, profile, roofline
from infer_server.cli.run_engine import ready_context
from infer_server.engines import load_engine
from infer_server.engines.plan.coverage import Coverage, coverage_of, writes_border
from infer_server.engines.plan.extents import text
from infer_server.engines.plan.file import read_plan
from infer_server.engines.plan.plan import IoTensor, OpenPart, Plan, Step
from infer_server.engines.plan.program import Region
from infer_server.engines.plan.roofline import expected, expected_us
from infer_server.engines.plan.symbolic.conditions import conditions
from infer_server.engines.plan.symbolic.encoding import decode
from infer_server.engines.plan.weights import weights_text
from infer_server.reporting.command import add_report, check_report, report_plan

MOST_CONDITIONS = 4     # conditions of a symbolic plan that are printed; --json has all


def describe(plan: Plan) -> dict[str, Any]:
    """Return the plan as the JSON object that --json prints."""
    machine, modelled = plan.machine, expected_us(plan)
    return {
        "name": plan.name, "target": machine.target, "cpu": dict(machine.cpu), "precision": plan.precision,
        "max_batch": plan.max_batch, "dependence": plan.dependence,
        "inputs": [_tensor(t) for t in plan.inputs], "outputs": [_tensor(t) for t in plan.outputs],
        **({"open": _open(plan, plan.open)} if plan.open else {}),
        **({"program": program(plan).splitlines()} if plan.program else {}),
        "kernels": [{"name": s.name, "fuses": list(s.fuses), "precision": s.precision, "tactic": s.tactic,
                     **({"kept_float": True} if is_kept_float(plan, s) else {}),
                     "time_us": s.time_us, "macs": s.macs, "bytes": s.bytes,
                     **({"expected_us": modelled[n]} if modelled else {}),
                     **({"fallback": s.reason} if s.fallback else {})}
                    for n, s in enumerate(machine.steps) if not writes_border(s)],
        "coverage": _coverage(coverage_of(plan)), "borders": [s.name for s in machine.steps if writes_border(s)],
        "by_item": [[s.name for s in machine.steps[run.first:run.last]] for run in machine.item_major],
        "constants_bytes": len(machine.constants), "expanded_bytes": machine.expanded_bytes,
        "code_bytes": sum(map(len, machine.code)),
        "buffer_bytes": sum(b.bytes for b in machine.buffers), "metadata": dict(plan.metadata),
    }


def _coverage(coverage: Coverage) -> dict[str, Any]:
    return {"compiled": coverage.compiled, "specialised": coverage.specialised,
            "by_reference": [vars(step) for step in coverage.by_reference],
            "reference_share": coverage.reference_share, "times": coverage.basis}


def _open(plan: Plan, part: OpenPart) -> dict[str, Any]:
    """Describe the open extents of a plan and its specialisations."""
    return {"inputs": [_tensor(t) for t in part.inputs], "outputs": [_tensor(t) for t in part.outputs],
            "deciding": list(part.deciding),
            "profiles": [{name: list(bounds) for name, bounds in profile.items()} for profile in part.profiles],
            "specialisations": [dict(one.extents) for one in (plan, *part.others)],
            "symbolic_plans": [{"traced_at": one.of_shape, "conditions": conditions(one)}
                               for one in decode(part.symbolic, plan)], "stripped": not part.model}


def symbolic_plans(plan: Plan) -> str:
    """Return the symbolic plans of a plan as text, one on each line; "" if there are none."""
    part = plan.open_part
    lines = [f"  {', '.join(conditions(one)[:MOST_CONDITIONS])}"
             f"{f', and {more} more conditions' if (more := len(conditions(one)) - MOST_CONDITIONS) > 0 else ''}"
             f" (traced at {text(one.of_shape)})" for one in decode(part.symbolic, plan)]
    if part.symbolic and not lines:
        return "symbolic plans: of another version of the compiler, so they are traced again"
    return "\n".join(["symbolic plans, which run other shapes where", *lines]) if lines else ""


def _tensor(tensor: IoTensor) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}


def kernels(plan: Plan) -> str:
    """Return the number of kernels as text: "56 kernels, 3 border writers"."""
    borders = sum(map(writes_border, plan.machine.steps))
    return f"{len(plan.machine.steps) - borders} kernels" + (f", {borders} border writers" if borders else "")


def program(plan: Plan) -> str:
    """Return the instructions of a program, one on each line, with indented regions."""
    part = plan.program
    assert part is not None

    def lines(region: Region, indent: str) -> Iterator[str]:
        for instruction in region.instructions:
            if instruction.op:
                yield f"{indent}{instruction.op} '{instruction.name}'"
            else:
                plans = [one for plan in part.segments[instruction.segment].plans for one in plan.within()]
                met = "; ".join(f"{kernels(one)} for {text(one.extents) or 'its only shapes'}" for one in plans)
                yield f"{indent}segment {instruction.name}: {met or 'compiled at first use'}"
                for plan in part.segments[instruction.segment].plans:
                    yield from (f"{indent}    {line}" for line in symbolic_plans(plan).splitlines())
            for inner in instruction.regions:
                yield from lines(inner, indent + "    ")

    return "\n".join(lines(part.main, ""))


def is_kept_float(plan: Plan, step: Step) -> bool:
    """Return True if the step computes an ONNX node that --keep-float left in float."""
    return not set(plan.metadata.get("kept_float", ())).isdisjoint(step.fuses)


def layers(plan: Plan) -> str:
    """Return a table with a line for each kernel, or the instructions of a program."""
    if plan.program:
        return program(plan)
    modelled, steps = expected_us(plan), plan.machine.steps
    rows = [(step.name, step.precision + " (kept)" * is_kept_float(plan, step), step.tactic, us, step.macs / 1e6,
             " + ".join(step.fuses) or "-")
            for step, us in zip(steps, modelled or [step.time_us for step in steps], strict=True)]
    return table(rows, ("kernel", "precision", "tactic", "us expected" if modelled else "us", "M MAC", "fuses"))


def _times(plan: Plan) -> str:
    if modelled := expected_us(plan):
        return f"{sum(modelled) / 1e3:.3f} ms an item by the cost model"
    timed = sum(step.time_us for step in plan.machine.steps)
    return f"{timed / 1e3:.3f} ms as timed one by one" if timed else "nothing was timed"


def by_reference(coverage: Coverage) -> str:
    """Return a text with the steps that run on the reference and the reasons; "" if there are none."""
    return f"not compiled, running on the reference:\n{coverage.reasons}" if coverage.by_reference else ""


def _command(options: argparse.Namespace) -> int:
    if options.profile:
        engine = load_engine(options.plan)
        result = profile(engine, ready_context(engine, options.batch), options.batch)
        print(json.dumps(as_json(result), indent=1) if options.json else f"{header(result)}\n\n{roofline(result)}")
        return 0
    plan = read_plan(options.plan)
    if options.report:
        check_report(options.report)
        report_plan(options.report, options.plan, plan, lambda text: print(text, file=sys.stderr, flush=True))
        return 0
    if options.json:
        json.dump(describe(plan), sys.stdout, indent=1)
        print()
        return 0
    def shapes(tensors: tuple[IoTensor, ...]) -> str:
        return ", ".join(f"{t.name} {t.dtype}{list(t.shape)}" for t in tensors)

    machine = plan.machine
    print(f"{plan.name}: {plan.precision} for {machine.target}, "
          f"batches of up to {plan.max_batch or 'the declared shape'}")
    if plan.dependence:
        print(f"items depend on each other, so a batch is neither cut nor merged: {plan.dependence}")
    if plan.open:
        specialised = "; ".join(text(one.extents) for one in (plan, *plan.open.others))
        print(f"open     {shapes(plan.open.inputs)}")
        if plan.open.deciding:
            print(f"decided  by the values of {', '.join(plan.open.deciding)}")
        print(*filter(None, (f"specialised for {specialised}", symbolic_plans(plan))), sep="\n")
        print("what follows is the first specialisation")
    print(f"inputs   {shapes(plan.inputs)}\noutputs  {shapes(plan.outputs)}\n")
    print(layers(plan))
    for run in machine.item_major:
        print(f"\nitem by item in batches: '{machine.steps[run.first].name}' to '{machine.steps[run.last - 1].name}'")
    print(f"\n{kernels(plan)}, {_times(plan)}, {sum(step.macs for step in machine.steps) / 1e6:.1f} M MAC, "
          f"{len(machine.constants) / 1e6:.2f} MB of constants"
          + (f", {machine.expanded_bytes / 1e6:.2f} MB more computed from them at load" if machine.expanded else ""))
    coverage = coverage_of(plan)
    if missing := by_reference(coverage):
        print(missing)
    print(*filter(None, (weights_text(plan.metadata), coverage.line, expected(plan))), sep="\n")
    if notices := plan.metadata.get("notices"):
        print("notices of the build:", *(f"  {notice}" for notice in notices), sep="\n")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("inspect-engine", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", help="plan file written by build-engine")
    parser.add_argument("--profile", action="store_true",
                        help="run the plan and show how far each kernel is from the roofline of this core or GPU")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="batch size of --profile (default 1)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    add_report(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(_command, make_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
