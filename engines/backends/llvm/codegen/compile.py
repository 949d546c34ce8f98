"""LLVM IR as text -> object code. Nothing here knows what a kernel computes."""
from __future__ import annotations

import sys
from functools import partial

import llvmlite.binding as llvm

from engines.backends.llvm.codegen.isa import Isa, isa_named
from engines.codegen.compiler_pool import CompilerPool, serve

llvm.initialize_all_targets()       # text for another machine can be compiled (not run) here
llvm.initialize_all_asmprinters()
# A kernel's text is already in the order it wants; LLVM's schedulers hoist loads until the tile spills.
llvm.set_option("", "--pre-RA-sched=source")
llvm.set_option("", "--enable-misched=false")


def compile_object(ir: str, isa: Isa) -> bytes:
    """The object file of a module's text, for the machine of `isa`.

    Raises RuntimeError, with LLVM's own message, if the text is no valid IR.
    """
    target = llvm.Target.from_triple(isa.triple or llvm.get_process_triple())
    machine = target.create_target_machine(isa.cpu, isa.features, opt=2, reloc="pic", codemodel="small")
    return bytes(machine.emit_object(llvm.parse_assembly(ir)))


def compiler_pool(isa: Isa) -> CompilerPool:
    """The same for many texts."""
    return CompilerPool(partial(compile_object, isa=isa), (__name__, isa.name))


if __name__ == "__main__":
    serve(partial(compile_object, isa=isa_named(sys.argv[1])))
