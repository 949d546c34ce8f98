"""Signal handler for SIGBUS as machine code, for mapped files that another process may truncate.

An access to a mapped page past the end of its file raises SIGBUS, which ends the process. The handler maps zeros over
the whole range, marks it and returns: the reader continues, and its caller checks the mark. libwayland does so with its
clients' buffers (wl_shm), and the JVM with mapped files.

    on_bus_error(signal, info, context)     the handler
        if a memory access failed within a range of the table:
            mark the range; map zeros over it
        else:
            restore the previous handler; raise the signal again, unless the access itself does
    place(row, begin, end)                  set a row of the table to a range, unmarked; NOWHERE: to none

The handler may interrupt any instruction on any thread, and on several threads at once. It therefore takes no lock, and
calls only sigaction, raise and the raw system call mmap, which are async-signal-safe. Two threads in one range both map
zeros, with equal results; the mark comes first, so that a reader of zeros finds it. A reader keeps its range mapped, so
that the handler never replaces memory of another owner.

A row may be read while it is written: `end` is written first and last, and read before and after `begin`. That does not
distinguish a removed range from the next one with an equal end. So no address lies in NOWHERE with any end, and callers
reuse rows as late as possible.
"""
from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from string import Template

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.codegen.compiler_pool import compile_in_subprocess
from infer_server.engines.errors import ConfigError

ROWS = 8192             # rows of the table
NOWHERE = (-1, 0)       # begin (the highest address) and end of an unused row
_MMAP = {"x86_64": 9, "aarch64": 222}                       # number of the system call
_PROT_READ = 1
_MAP_FIXED_ZEROS = 0x2 | 0x10 | 0x20 | 0x4000       # PRIVATE, FIXED, ANONYMOUS, NORESERVE; equal on both


class GuardRow(IntEnum):
    """64-bit words of a row of the table."""
    BEGIN = 0
    END = 1
    LOST = 2            # 1: zeros have been mapped over the range


@dataclass(frozen=True)
class ProcessAddresses:
    """Addresses in this process that the handler uses."""
    table: int
    previous: int       # the sigaction structure of the previous handler
    syscall: int        # functions of the C library
    sigaction: int
    raise_: int


def bus_guard_object(process: ProcessAddresses, isa: Isa, architecture: str) -> bytes:
    """Return both functions as an ELF object for this process, compiled in another process.

    Parameters
    ----------
    process : addresses that the handler uses.
    isa : instruction set to compile for.
    architecture : name of the machine, as platform.machine() gives it.

    Raises
    ------
    ConfigError
        The architecture is not supported.
    RuntimeError
        The compiler process failed, for example for lack of memory.
    """
    if architecture not in _MMAP:
        raise ConfigError(f"no guard for mapped files on {architecture}; supported architectures: {', '.join(_MMAP)}")
    addresses = {field.name: f"inttoptr (i64 {getattr(process, field.name)} to ptr)" for field in fields(process)}
    text = _CODE.substitute(addresses, mmap=_MMAP[architecture], read=_PROT_READ, zeros=_MAP_FIXED_ZEROS, rows=ROWS,
                            end=int(GuardRow.END), lost=int(GuardRow.LOST))
    return compile_in_subprocess(text, ("infer_server.engines.backends.llvm.codegen.compile", isa.name))


_CODE = Template("""\
define void @place(ptr %row, i64 %begin, i64 %end) {
  %end.at = getelementptr i64, ptr %row, i64 $end
  %lost.at = getelementptr i64, ptr %row, i64 $lost
  store atomic i64 0, ptr %end.at seq_cst, align 8
  store atomic i64 0, ptr %lost.at seq_cst, align 8
  store atomic i64 %begin, ptr %row seq_cst, align 8
  store atomic i64 %end, ptr %end.at seq_cst, align 8
  ret void
}

define void @on_bus_error(i32 %signal, ptr %info, ptr %context) {
  %code.at = getelementptr i32, ptr %info, i64 2            ; siginfo_t: si_signo, si_errno, si_code; si_addr at 16
  %code = load i32, ptr %code.at
  %kind = sub i32 %code, 2
  %is.access = icmp ult i32 %kind, 3                        ; BUS_ADRERR, BUS_OBJERR, BUS_MCEERR_AR
  %fault.at = getelementptr i64, ptr %info, i64 2
  %fault = load i64, ptr %fault.at
  br i1 %is.access, label %each, label %before

each:
  %i = phi i64 [0, %0], [%i, %look], [%next, %on]
  %row = getelementptr [3 x i64], ptr $table, i64 %i
  br label %look

look:
  %end.at = getelementptr i64, ptr %row, i64 $end
  %end = load atomic i64, ptr %end.at acquire, align 8
  %begin = load atomic i64, ptr %row acquire, align 8
  %again = load atomic i64, ptr %end.at acquire, align 8
  %is.whole = icmp eq i64 %end, %again
  br i1 %is.whole, label %test, label %each

test:
  %is.behind = icmp uge i64 %fault, %begin
  %is.before = icmp ult i64 %fault, %end
  %is.within = and i1 %is.behind, %is.before
  br i1 %is.within, label %replace, label %on

on:
  %next = add i64 %i, 1
  %is.more = icmp ult i64 %next, $rows
  br i1 %is.more, label %each, label %before

replace:
  %lost.at = getelementptr i64, ptr %row, i64 $lost
  store atomic i64 1, ptr %lost.at seq_cst, align 8
  %size = sub i64 %end, %begin
  %mapped = call i64 (i64, ...) $syscall(i64 $mmap, i64 %begin, i64 %size, i64 $read,
                                                           i64 $zeros, i64 -1, i64 0)
  %is.mapped = icmp eq i64 %mapped, %begin
  br i1 %is.mapped, label %done, label %before

before:
  %put.back = call i32 $sigaction(i32 %signal, ptr $previous, ptr null)
  br i1 %is.access, label %done, label %raise

raise:
  %raised = call i32 $raise_(i32 %signal)
  ret void

done:
  ret void
}
""")
