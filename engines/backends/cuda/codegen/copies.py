"""Copies from global to shared memory, which go on while a block computes where the GPU can (cp.async)."""
from __future__ import annotations

from engines.backends.cuda.codegen.gpu import Gpu
from engines.codegen.ir_builder import Function, Value
from engines.codegen.types import I32, vector

CHUNK = 16              # bytes that a thread copies at once


def copy_chunk(gpu: Gpu, to: Value, source: Value, taken: Value) -> None:
    """CHUNK bytes, some time later where the GPU can; zeros if `taken` (i32) is 0 and not CHUNK."""
    if gpu.async_copy:
        copy_async(to, source, CHUNK, taken)
    else:
        copy_by_register(to, source, taken)


def copy_by_register(to: Value, source: Value, taken: Value) -> None:
    """The same now."""
    f = to.f
    chunk = {"": f.constant(0, vector(4, I32))}
    with f.when_carrying(taken.compare("ne", 0), chunk):
        chunk[""] = f.load(vector(4, I32), source, CHUNK, "chunk")
    f.store(chunk[""], to, CHUNK)


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
