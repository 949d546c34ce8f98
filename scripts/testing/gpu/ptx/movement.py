"""Memory instructions: loads, stores, asynchronous copies, barriers and fences."""
from __future__ import annotations

import numpy as np

from scripts.testing.gpu.ptx.machine import TYPES, Run, action
from scripts.testing.gpu.ptx.memory import Array
from scripts.testing.gpu.ptx.text import Fault, Instruction

_SPACES = "global shared v2 v4"


def _count(i: Instruction, names: tuple[str, ...]) -> int:
    """Return the number of elements that an instruction moves."""
    if len(names) != max((int(word[1:]) for word in i.op if word in ("v2", "v4")), default=1):
        raise Fault(f"{len(names)} registers")
    return len(names)


def _offsets(run: Run, i: Instruction, operand: str, size: int) -> Array:
    if i.op[1] == "shared":
        return run.shared.at(run.who[0], run.address(operand), size)
    return run.memory.at(run.address(operand), size)


@action("ld", modifiers=f"{_SPACES} param nc")
def _ld(run: Run, i: Instruction) -> None:
    dtype = TYPES[i.op[-1]]
    if i.op[1] == "param":
        value = run.arguments[i.one(1).strip("[]")]
        run.put(i.one(0), np.full(run.size, value, f"u{dtype.itemsize}"))
        return
    names = i.several(0)
    size = dtype.itemsize * _count(i, names)
    offsets = _offsets(run, i, i.one(1), size)
    shared = i.op[1] == "shared"
    number = run.pick(run.number)
    for n, name in enumerate(names):
        if not shared:
            run.memory.reads(offsets + n * dtype.itemsize, number)
        elif name not in run.kernel.unread:
            run.shared.reads(*run.who, offsets + n * dtype.itemsize, dtype.itemsize)
    source = run.shared.bytes if shared else run.memory.bytes
    for n, name in enumerate(names):
        run.put(name, source.view(dtype)[offsets // dtype.itemsize + n])


@action("st", modifiers=_SPACES)
def _st(run: Run, i: Instruction) -> None:
    dtype, names = TYPES[i.op[-1]], i.several(1)
    size = dtype.itemsize * _count(i, names)
    offsets = _offsets(run, i, i.one(0), size)
    shared = i.op[1] == "shared"
    if shared:
        run.shared.will_write(*run.who, offsets, size)
        run.shared.wrote(*run.who, offsets, size)
    else:
        run.memory.writes(offsets, size, run.pick(run.number))
    target = run.shared.bytes if shared else run.memory.bytes
    for n, name in enumerate(names):
        target.view(dtype)[offsets // dtype.itemsize + n] = run.get(name, i.op[-1])


@action("cp", modifiers="async ca cg shared global commit_group wait_group")
def _cp(run: Run, i: Instruction) -> None:
    lanes = np.arange(run.lanes) if run.sel is None else run.sel
    if i.op[2] == "commit_group":
        run.groups[lanes] += 1
    elif i.op[2] == "wait_group":
        _land(run, lanes, int(i.one(0)))
    else:
        _set_out(run, i, lanes)


def _set_out(run: Run, i: Instruction, lanes: Array) -> None:
    """Begin an asynchronous copy: it reads now and writes when it is waited for."""
    size = int(i.one(2))
    if size not in ((16,) if "cg" in i.op else (4, 8, 16)):
        raise Fault(f"copies {size} bytes")
    counts = run.get(i.one(3), "u32").astype(np.int64) if len(i.operands) > 3 else np.full(run.size, size)
    if np.any(counts > size):
        raise Fault(f"takes {counts.max()} of {size} bytes")
    offsets = run.shared.at(run.who[0], run.address(i.one(0)), size)
    some = counts > 0
    addresses = run.address(i.one(1))
    if np.any(addresses % size):
        raise Fault(f"an address is not a multiple of {size}")
    data = np.zeros((run.size, size), np.uint8)
    for at in range(size):
        here = counts > at
        sources = run.memory.at(addresses[here] + at, 1)
        run.memory.reads(sources, run.pick(run.number)[here])
        data[here, at] = run.memory.bytes[sources]
    assert not data[~some].any()
    run.shared.will_write(*run.who, offsets, size)
    run.shared.set_out(offsets, size)
    run.copies.append((lanes, run.groups[lanes], offsets, data))


def _land(run: Run, lanes: Array, pending: int) -> None:
    """Complete all asynchronous copy groups of these threads but the last `pending` ones."""
    here = np.zeros(run.lanes, bool)
    here[lanes] = True
    left = []
    for threads, group, offsets, data in run.copies:
        landed = here[threads] & (group < run.groups[threads] - pending)
        now, size = threads[landed], data.shape[1]
        run.shared.bytes[offsets[landed][:, None] + np.arange(size)] = data[landed]
        run.shared.wrote(run.block[now], run.thread[now], offsets[landed], size)
        if not landed.all():
            left.append((threads[~landed], group[~landed], offsets[~landed], data[~landed]))
    run.copies = left


@action("bar", "barrier", modifiers="sync")
def _bar(run: Run, i: Instruction) -> None:
    if i.operands != ("0",):
        raise Fault("only barrier 0 of the whole block is known here")
    run.shared.epoch[np.unique(run.who[0])] += 1


@action("fence", modifiers="proxy async shared::cta")
def _fence(run: Run, i: Instruction) -> None:
    run.shared.fence(*run.who)
