"""LLVM IR as text -> PTX -> machine code (a cubin) -> the classes of its instructions. None of it needs a GPU.

PTX comes from the NVPTX target inside llvmlite. Machine code comes from nvJitLink, a library, or from ptxas, a program,
where one is installed (the extra `cuda` has both); without them the driver makes it of the plan's PTX, at each start.
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

import llvmlite.binding as llvm

from engines.backends.cuda.codegen.gpu import Gpu, gpu_named
from engines.codegen.compiler_pool import CompilerPool, serve
from engines.errors import CompilerFault

_TRIPLE = "nvptx64-nvidia-cuda"
_IS_PTX = 2             # nvJitLink's number for what it is handed
_CLASSES = ("IDP", "IMMA", "HMMA", "IGMMA", "HGMMA", "FFMA", "LDSM", "LDGSTS", "LDG", "STG", "LDS", "STS", "BAR",
            "SHFL", "LDL", "STL")       # the last two: spills


@cache
def _target() -> llvm.Target:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.set_option("", "--nvptx-short-ptr")        # pointers to shared memory are 32 bits
    return llvm.Target.from_triple(_TRIPLE)


def ptx_of(text: str, gpu: Gpu) -> str:
    """The module as PTX for that architecture. Raises RuntimeError, with LLVM's own message, if it is no valid IR."""
    machine = _target().create_target_machine(cpu=gpu.name, features=f"+ptx{gpu.ptx}", opt=3)
    module = llvm.parse_assembly(text)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return str(machine.emit_assembly(module))


def code_of(text: str, gpu: Gpu, cubin: bool) -> bytes:
    """What a driver loads: machine code, where it is wanted and can be made here, else PTX."""
    ptx = ptx_of(text, gpu)
    return cubin and cubin_of(ptx, gpu) or ptx.encode()


def compiler_pool(gpu: Gpu, cubin: bool) -> CompilerPool:
    """The same for many modules."""
    return CompilerPool(partial(code_of, gpu=gpu, cubin=cubin), (__name__, gpu.name, str(int(cubin))))


# ---- machine code
def cubin_of(ptx: str, gpu: Gpu) -> bytes:
    """The machine code; b"" where nothing is installed that makes it, or what is does not know the architecture."""
    if library := (_find("nvidia.nvjitlink", "lib/libnvJitLink.so*")        # of CUDA 12; of 13
                   or _find("nvidia.cu13", "lib/libnvJitLink.so*")):
        return _linked(ptx, gpu, library)
    return b""


def report_of(ptx: str, gpu: Gpu) -> tuple[bytes, str]:
    """The same by ptxas, and what it says of registers and spills. Raises FileNotFoundError: it is not installed, or
    knows other architectures only."""
    program = _find("nvidia.cuda_nvcc", "bin/ptxas") or "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(ptx)
        run = subprocess.run([program, "-v", f"-arch={gpu.name}", str(source), "-o", str(result)],
                             capture_output=True, text=True)
        if "is not defined for option 'gpu-name'" in run.stderr:
            raise FileNotFoundError(f"{program} does not know {gpu.name}")
        if run.returncode:
            raise CompilerFault(f"ptxas refuses a kernel for {gpu.name}: {run.stderr}")
        return result.read_bytes(), run.stderr


def _find(package: str, pattern: str) -> str:
    """A file of an installed package of NVIDIA's; "" if it is not there."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return ""
    places = found.submodule_search_locations if found else None
    return next((str(path) for place in places or () for path in sorted(Path(place).glob(pattern))), "")


def _linked(ptx: str, gpu: Gpu, library: str) -> bytes:
    link = ctypes.CDLL(library)
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * 1)(f"-arch={gpu.name}".encode())
    if link.nvJitLinkCreate(ctypes.byref(handle), ctypes.c_uint32(1), options):
        return b""          # it does not know the architecture

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


# ---- what is in it
def sass_of(cubin: bytes) -> str:
    """The machine code as text. Raises FileNotFoundError: nvdisasm is not installed."""
    program = _find("nvidia.cuda_nvdisasm", "bin/nvdisasm") or _find("nvidia.cu13", "bin/nvdisasm") or "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, file.name], capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> list[str]:
    """Its instructions by name, in order."""
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", sass, re.M)


def classes(sass: str) -> dict[str, int]:
    """How many instructions there are of each class, and of all."""
    words = instructions(sass)
    count = collections.Counter(word.split(".")[0] for word in words)
    return {"all": len(words), **{name: count[name] for name in _CLASSES if count[name]}}


if __name__ == "__main__":
    serve(partial(code_of, gpu=gpu_named(sys.argv[1]), cubin=sys.argv[2] == "1"))
