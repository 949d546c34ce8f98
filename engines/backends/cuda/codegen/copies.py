"""Copies from global to shared memory, asynchronous where the GPU has cp.async."""
from __future__ import annotations

from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import I32, vector

CHUNK = 16              # bytes per thread and copy


def copy_chunk(gpu: Gpu, to: Value, source: Value, taken: Value) -> None:
    """Copy CHUNK bytes, asynchronously if possible. `taken` (i32) is CHUNK, or 0 to write zeros."""
    if gpu.async_copy:
        copy_async(to, source, CHUNK, taken)
    else:
        copy_by_register(to, source, taken)


def copy_by_register(to: Value, source: Value, taken: Value) -> None:
    """Copy CHUNK bytes through registers. `taken` (i32) is CHUNK, or 0 to write zeros."""
    f = to.f
    chunk = {"": f.constant(0, vector(4, I32))}
    with f.when_carrying(taken.compare("ne", 0), chunk):
        chunk[""] = f.load(vector(4, I32), source, CHUNK, "chunk")
    f.store(chunk[""], to, CHUNK)


def copy_async(to: Value, source: Value, size: int, taken: Value) -> None:
    """Copy `taken` (i32) of `size` bytes to shared memory with cp.async, and fill the rest with zeros."""
    way = "cg" if size == 16 else "ca"
    # As assembly: LLVM 20 has no pattern of its intrinsic for pointers of 32 bits.
    text = f"cp.async.{way}.shared.global [$0], [$1], {size}, $2;"
    to.f.write(f'call void asm sideeffect "{text}", "r,l,r,~{{memory}}"({to}, {source}, {taken})')


def commit(f: Function) -> None:
    """Close a group of the copies since the last commit."""
    f.run("llvm.nvvm.cp.async.commit.group")


def wait(f: Function, groups: int) -> None:
    """Wait until at most `groups` groups of this thread are pending."""
    f.run("llvm.nvvm.cp.async.wait.group", f.constant(groups, I32))
