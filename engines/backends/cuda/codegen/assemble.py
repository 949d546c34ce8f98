"""Compiles LLVM IR to PTX and to machine code (cubin), and disassembles it for statistics. Needs no GPU.

PTX comes from llvmlite's NVPTX target. Machine code comes from nvJitLink, a library, or from ptxas, a program, if one
is installed (the extra `cuda` has both). Without them the driver compiles the plan's PTX at each start.
"""
from __future__ import annotations

import collections
import ctypes
import importlib.util
import re
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from infer_server.engines.backends.cuda.codegen.gpu import Gpu, gpu_named
from infer_server.engines.codegen.compiler_pool import CompilerPool, serve
from infer_server.engines.errors import CompilerFault
from infer_server.engines.machine import object_cache

_TRIPLE = "nvptx64-nvidia-cuda"
_OPT = 3
_OPTIONS = ("--nvptx-short-ptr",)       # pointers to shared memory are 32 bits
_IS_PTX = 2             # NVJITLINK_INPUT_PTX
_CLASSES = ("IDP", "IMMA", "HMMA", "IGMMA", "HGMMA", "FFMA", "LDSM", "LDGSTS", "LDG", "STG", "LDS", "STS", "BAR",
            "SHFL", "LDL", "STL")       # the last two: spills


@cache
def _target() -> llvm.Target:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for option in _OPTIONS:
        llvm.set_option("", option)
    return llvm.Target.from_triple(_TRIPLE)


def ptx_of(text: str, gpu: Gpu) -> str:
    """Compile a module to PTX for an architecture, or take the PTX from the object cache.

    Raises
    ------
    RuntimeError
        The IR is invalid; the message is LLVM's.
    """
    cache = object_cache.current()
    if cache is None:
        return _ptx_of(text, gpu)
    key = object_cache.digest("ptx", text, gpu.name, _features(gpu), repr((
        _TRIPLE, _OPT, _OPTIONS, llvm.llvm_version_info, llvmlite.__version__)))
    code = cache.fetch(key)
    if code is None:
        code = _ptx_of(text, gpu).encode()
        cache.store(key, code)
    return code.decode()


def _ptx_of(text: str, gpu: Gpu) -> str:
    machine = _target().create_target_machine(cpu=gpu.name, features=_features(gpu), opt=_OPT)
    module = llvm.parse_assembly(text)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=_OPT))
    builder.getModulePassManager().run(module, builder)
    return str(machine.emit_assembly(module))


def _features(gpu: Gpu) -> str:
    return f"+ptx{gpu.ptx}"


def code_of(text: str, gpu: Gpu, cubin: bool) -> bytes:
    """Return machine code if `cubin` is set and it can be made here, else PTX."""
    ptx = ptx_of(text, gpu)
    return cubin and cubin_of(ptx, gpu) or ptx.encode()


def compiler_pool(gpu: Gpu, cubin: bool) -> CompilerPool:
    """Return a pool of processes that run `code_of`."""
    return CompilerPool(partial(code_of, gpu=gpu, cubin=cubin), (__name__, gpu.name, str(int(cubin))))


# ---- machine code
def cubin_of(ptx: str, gpu: Gpu) -> bytes:
    """Return machine code, or b"" if nvJitLink is not installed or does not support the architecture."""
    if library := (_find("nvidia.nvjitlink", "lib/libnvJitLink.so*")        # CUDA 12; 13
                   or _find("nvidia.cu13", "lib/libnvJitLink.so*")):
        return _linked(ptx, gpu, library)
    return b""


def report_of(ptx: str, gpu: Gpu) -> tuple[bytes, str]:
    """Return ptxas's machine code and its report on registers and spills.

    Raises
    ------
    FileNotFoundError
        ptxas is not installed, or does not support the architecture.
    CompilerFault
        ptxas rejects the PTX.
    """
    program = ptxas()
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(ptx)
        run = subprocess.run([program, "-v", f"-arch={gpu.name}", str(source), "-o", str(result)],
                             capture_output=True, text=True)
        if "is not defined for option 'gpu-name'" in run.stderr:
            raise FileNotFoundError(f"{program} does not know {gpu.name}")
        if run.returncode:
            raise CompilerFault(f"ptxas rejects a kernel for {gpu.name}: {run.stderr}")
        return result.read_bytes(), run.stderr


def ptxas() -> str:
    """Return the path of NVIDIA's assembler, or its name if no package has it."""
    return _find("nvidia.cuda_nvcc", "bin/ptxas") or "ptxas"


def nvdisasm() -> str:
    """Return the path of NVIDIA's disassembler, or its name if no package has it."""
    return _find("nvidia.cuda_nvdisasm", "bin/nvdisasm") or _find("nvidia.cu13", "bin/nvdisasm") or "nvdisasm"


def _find(package: str, pattern: str) -> str:
    """Return the path of a file in one of NVIDIA's packages, or "" if it is absent."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return ""
    folders = found.submodule_search_locations if found else None
    return next((str(path) for folder in folders or () for path in sorted(Path(folder).glob(pattern))), "")


def _linked(ptx: str, gpu: Gpu, library: str) -> bytes:
    link = ctypes.CDLL(library)
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * 1)(f"-arch={gpu.name}".encode())
    if link.nvJitLinkCreate(ctypes.byref(handle), ctypes.c_uint32(1), options):
        return b""          # unsupported architecture

    def call(name: str, *arguments: object) -> None:
        if status := getattr(link, name)(*arguments):
            length = ctypes.c_size_t()
            link.nvJitLinkGetErrorLogSize(handle, ctypes.byref(length))
            log = ctypes.create_string_buffer(length.value)
            link.nvJitLinkGetErrorLog(handle, log)
            raise CompilerFault(f"{name} for {gpu.name}: {status}: {log.value.decode()}")

    try:
        data = ptx.encode() + b"\0"
        call("nvJitLinkAddData", handle, ctypes.c_int(_IS_PTX), data, ctypes.c_size_t(len(data)), b"kernels")
        call("nvJitLinkComplete", handle)
        call("nvJitLinkGetLinkedCubinSize", handle, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        call("nvJitLinkGetLinkedCubin", handle, cubin)
        return cubin.raw
    finally:
        link.nvJitLinkDestroy(ctypes.byref(handle))


# ---- disassembly
def sass_of(cubin: bytes) -> str:
    """Disassemble machine code. Raise FileNotFoundError if nvdisasm is not installed."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([nvdisasm(), file.name], capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> list[str]:
    """Return the names of the instructions in order."""
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", sass, re.M)


def classes(sass: str) -> dict[str, int]:
    """Count the instructions of each class in _CLASSES, and all of them."""
    words = instructions(sass)
    count = collections.Counter(word.split(".")[0] for word in words)
    return {"all": len(words), **{name: count[name] for name in _CLASSES if count[name]}}


if __name__ == "__main__":
    serve(partial(code_of, gpu=gpu_named(sys.argv[1]), cubin=sys.argv[2] == "1"))
