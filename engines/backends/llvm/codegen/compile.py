"""LLVM IR as text -> object code. Nothing here knows what a kernel computes."""
from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm

from engines.backends.llvm.codegen.isa import Isa

llvm.initialize_all_targets()       # text for another machine can be compiled (not run) here
llvm.initialize_all_asmprinters()
# A kernel's text is already in the order it wants; LLVM's schedulers hoist loads until the tile spills.
llvm.set_option("", "--pre-RA-sched=source")
llvm.set_option("", "--enable-misched=false")

# LLVM's name of a feature -> the name in /proc/cpuinfo, where they differ
_CPUINFO = {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16", "avxvnni": "avx_vnni",
            "neon": "asimd", "dotprod": "asimddp"}


@cache
def host_features() -> frozenset[str]:
    """What this machine has, as Isa.requires names it."""
    found = llvm.get_host_cpu_features()
    return frozenset(_CPUINFO.get(name, name) for name, has in found.items() if has)


def compile_object(ir: str, isa: Isa) -> bytes:
    """The object file of a module's text, for the machine of `isa`.

    Raises RuntimeError, with LLVM's own message, if the text is no valid IR.
    """
    target = llvm.Target.from_triple(isa.triple or llvm.get_process_triple())
    machine = target.create_target_machine(isa.cpu, isa.features, opt=2, reloc="pic", codemodel="small")
    return bytes(machine.emit_object(llvm.parse_assembly(ir)))
