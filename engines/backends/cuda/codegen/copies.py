"""Copies from global to shared memory that go on while a block computes (cp.async)."""
from __future__ import annotations

from engines.codegen.ir_builder import Function, Value
from engines.codegen.types import I32


def copy_async(to: Value, source: Value, size: int, taken: Value) -> None:
    """`taken` (i32) of the `size` bytes at source go to shared memory, and zeros for the rest, some time later."""
    way = "cg" if size == 16 else "ca"
    # As assembly: LLVM 20 has no pattern of its intrinsic for pointers of 32 bits.
    text = f"cp.async.{way}.shared.global [$0], [$1], {size}, $2;"
    to.f.write(f'call void asm sideeffect "{text}", "r,l,r,~{{memory}}"({to}, {source}, {taken})')


def commit(f: Function) -> None:
    """What was copied since the last commit is one group."""
    f.run("llvm.nvvm.cp.async.commit.group")


def wait(f: Function, groups: int) -> None:
    """Until no more than that many groups of this thread are on their way."""
    f.run("llvm.nvvm.cp.async.wait.group", f.constant(groups, I32))
