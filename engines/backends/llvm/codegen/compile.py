"""Compile LLVM IR text to object code. This module knows nothing of kernels."""
from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial

import llvmlite
import llvmlite.binding as llvm

from infer_server.engines.backends.llvm.codegen.isa import Isa, isa_named
from infer_server.engines.codegen.compiler_pool import CompilerPool, serve
from infer_server.engines.machine import object_cache

# Kernels emit instructions in the order in which they should run; LLVM's schedulers hoist loads until tiles spill.
_GLOBAL_OPTIONS = ("--pre-RA-sched=source", "--enable-misched=false")
_OPTIONS = {"reloc": "pic", "codemodel": "small"}
OPT = 2

llvm.initialize_all_targets()       # allows to compile for other machines, though not to run
llvm.initialize_all_asmprinters()
for option in _GLOBAL_OPTIONS:
    llvm.set_option("", option)


def compile_object(ir: str, isa: Isa) -> bytes:
    """Return the object file of a module's text for the machine of `isa`, from the object cache if it is there.

    Parameters
    ----------
    ir : text of an LLVM module.
    isa : instruction set to compile for.

    Raises
    ------
    RuntimeError
        The text is not valid IR; the message is LLVM's.
    """
    return compile_cached(ir, isa.triple, isa.cpu, isa.features)


def compile_cached(ir: str, triple: str, cpu: str, features: str, opt: int = OPT) -> bytes:
    """Return the object file of a module's text for a target, from the object cache if it is there.

    Parameters
    ----------
    ir : text of an LLVM module.
    triple, cpu, features : LLVM's names of the target; triple "" is the triple of this process.
    opt : LLVM's optimisation level of code generation, 0 to 3.

    Raises
    ------
    RuntimeError
        The text is not valid IR; the message is LLVM's.
    """
    objects = object_cache.current()
    if objects is None:
        return _compile(ir, triple, cpu, features, opt)
    key = object_key(ir, triple, cpu, features, opt)
    code = objects.fetch(key)
    if code is None:
        code = _compile(ir, triple, cpu, features, opt)
        objects.store(key, code)
    return code


def object_key(ir: str, triple: str, cpu: str, features: str, opt: int = OPT) -> str:
    """Return the key of an object in the object cache: a digest of all that decides which bytes LLVM emits."""
    return object_cache.digest("llvm", ir, triple or llvm.get_process_triple(), cpu, features,
                               repr((opt, _OPTIONS, _GLOBAL_OPTIONS, llvm.llvm_version_info, llvmlite.__version__)))


@cache
def target_machine(triple: str, cpu: str, features: str, opt: int = OPT) -> llvm.TargetMachine:
    """Return LLVM's code generator for a target, with the options that all kernels are compiled with."""
    target = llvm.Target.from_triple(triple or llvm.get_process_triple())
    return target.create_target_machine(cpu, features, opt=opt, **_OPTIONS)


def _compile(ir: str, triple: str, cpu: str, features: str, opt: int = OPT) -> bytes:
    return bytes(target_machine(triple, cpu, features, opt).emit_object(llvm.parse_assembly(ir)))


def compiler_pool(isa: Isa) -> CompilerPool:
    """Return a pool that compiles texts as compile_object does, in several processes."""
    return CompilerPool(_compiler(isa), (__name__, isa.name),
                        partial(object_key, triple=isa.triple, cpu=isa.cpu, features=isa.features))


def _compiler(isa: Isa) -> Callable[[str], bytes]:
    """Return a function that compiles a text for the machine of `isa`, without the object cache."""
    return partial(_compile, triple=isa.triple, cpu=isa.cpu, features=isa.features)


if __name__ == "__main__":
    serve(_compiler(isa_named(sys.argv[1])))
