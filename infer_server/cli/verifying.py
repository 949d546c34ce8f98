"""build-engine --verify: compare a plan with the model it was built from."""
from __future__ import annotations

from collections.abc import Iterable

from tqdm import tqdm

from infer_server.calibration.accuracy.errors import OutputErrors
from infer_server.calibration.accuracy.verify import Verification, verify
from infer_server.calibration.data.items import Feed
from infer_server.calibration.workflow import Calibration
from infer_server.cli.common import table
from infer_server.engines.backends import device_of
from infer_server.engines.compiler.builder import BuildConfig
from infer_server.engines.compiler.ranges import Notify
from infer_server.engines.plan.file import read_plan

HEADER = ("output", "largest error", "of range", "item", "mean", "median", "SQNR dB", "cosine", "differ %", "")


def verify_build(plan: str, model: str, config: BuildConfig, calibration: Calibration | None, notify: Notify,
                 warn: Notify) -> bool:
    """Return True if the plan file passes; print the table with `notify`, and faults with advice with `warn`."""
    data, read = None, read_plan(plan)
    if calibration and calibration.data:
        data = calibration.open(read.open.inputs if read.open else read.inputs, config.pixels is not None, read.extents)
    result = verify(plan, model, data, shapes=config.shapes, constants=config.constants, pixels=config.pixels,
                   progress=_bar)
    source = data.source if data else "generated inputs"
    notify(f"{plan} ({result.precision}) beside {result.oracle}, {result.items} items of {source}:\n{listed(result)}")
    for note in result.notes:
        warn(f"{plan}: {note}")
    if not result.faults:
        elsewhere = device_of(read.machine.backend).mismatch(read)
        notify(f"{plan}: verified" + f", as it is compiled for this machine: {elsewhere}" * bool(elsewhere))
        return True
    warn("\n".join([f"{plan}: NOT verified", *(f"  {fault}" for fault in result.faults), f"  {result.advice}"]))
    return False


def listed(result: Verification) -> str:
    """Return a table with the errors of each output and of each part that is judged separately.

    The worst part is marked.
    """
    rows = [_row(errors, bool(errors.fault(result.limits))) for errors in (*result.outputs, *result.parts)]
    for row in rows[len(result.outputs):]:
        row[-1] += ", the worst part" * (row[0] == result.worst)
    return table(rows, HEADER)


def _row(errors: OutputErrors, is_fault: bool) -> list[str]:
    verdict = "FAILED" if is_fault else "passed"
    differing = errors.missing / max(errors.rows, 1) if errors.rows >= 0 else errors.differing
    if errors.wrong or not errors.floating:
        numbers = ["-"] * 7
    else:
        numbers = [f"{errors.largest:.3g}", f"{errors.relative:.2e}", str(errors.item), f"{errors.mean:.3g}",
                   f"{errors.median:.3g}", f"{errors.sqnr_db:.1f}", f"{errors.cosine:.6f}"]
    return [errors.name, *numbers, f"{100 * differing:.2f}", verdict + f" ({errors.rows} rows)" * (errors.rows >= 0)]


def _bar(feeds: Iterable[Feed], slow: bool) -> Iterable[Feed]:
    """Show progress on stderr, if that is a terminal and the verification is slow."""
    return tqdm(feeds, desc="verifying", unit="batch", disable=None, leave=False) if slow else feeds
