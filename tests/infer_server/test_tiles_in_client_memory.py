"""Tile loads from clients' shared memory that is cut short: the guard of mapped files catches them as it does others.

The kernel saves 8 KiB of tile registers in the frame of the signal, for which the stack must have room.
"""
from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from infer_server.backend import load_plan
from infer_server.calibration.workflow import Calibration
from infer_server.endpoints.mapped_memory import Mapping, guard
from infer_server.engines.backends.llvm.codegen.isa import AVX512_AMX
from infer_server.engines.compiler.build import build_engine
from infer_server.engines.compiler.specialise import relower
from infer_server.engines.plan.arena import ChangingArray
from infer_server.engines.plan.file import write_plan
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine
from tests.engines.backends.llvm.jit import runs_here
from tests.engines.compiler.small_models import node, small_model
from tests.infer_server.serving import serving

pytestmark = pytest.mark.skipif(not runs_here(AVX512_AMX), reason="no tile registers here")
ITEMS, PIXELS, CHANNELS = 4, 2048, 64
SHAPE = (ITEMS, PIXELS, CHANNELS)
OFFSET = 512                    # of x in its file: pages end amid the 16 rows of 64 bytes of a tile load
PAGE = 4096
Bytes = NDArray[np.uint8]
_AT_MINSIGSTKSZ = 51            # of getauxval: the least alternate stack that a signal's frame fits
_SS_DISABLE = 2


def first_step_on_the_input(plan: Plan) -> Plan:
    """Return the plan without its first step, which converts the input: the next one reads the caller's bytes."""
    (view,), (convert, *steps) = plan.machine.inputs, plan.machine.steps
    buffer = convert.operands[-1].buffer
    assert buffer is not None and steps[0].operands[0].buffer == buffer
    stored = replace(view, dtype="uint8", buffer=buffer, strides=(CHANNELS, 1), item_stride=PIXELS * CHANNELS)
    steps = [replace(step, depends=tuple(number - 1 for number in step.depends if number)) for step in steps]
    buffers = tuple(replace(one, first=max(one.first - 1, -1), last=max(one.last - 1, 0))
                    for one in plan.machine.buffers)
    return replace(plan, inputs=(replace(plan.inputs[0], dtype="uint8"),), fingerprint="",
                   machine=replace(plan.machine, inputs=(stored,), steps=tuple(steps), buffers=buffers))


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """Target -> plan of one matrix product, from bytes to floats."""
    folder, random = tmp_path_factory.mktemp("model"), np.random.default_rng(0)
    weights = random.standard_normal((CHANNELS, 32)).astype(np.float32)
    model = small_model([node("MatMul", "x w", "y")], {"x": ["N", PIXELS, CHANNELS]}, ["y"], {"w": weights})
    np.savez(folder / "calibration.npz", x=random.standard_normal(SHAPE).astype(np.float32))
    built = build_engine(model, calibration=Calibration(folder / "calibration.npz", "minmax"), precision="int8",
                         cache=False, timing=False, max_batch=ITEMS, target="avx512_amx").plan
    actual = {target: first_step_on_the_input(relower(built, target)) for target in ("avx512_amx", "avx512_bf16")}
    assert [" amx" in plan.machine.steps[0].tactic for plan in actual.values()] == [True, False]
    return actual


@pytest.fixture
def x() -> Bytes:
    return np.random.default_rng(1).integers(0, 256, SHAPE).astype(np.uint8)


class CutFile:
    """File of a client that is cut after it was mapped."""

    def __init__(self, x: Bytes) -> None:
        self._x, self._file = x, os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)

    def mapped(self, pages: int) -> tuple[Mapping, ChangingArray]:
        """Write the file, map it, and cut it after so many pages."""
        installed = guard()
        assert installed is not None
        os.pwrite(self._file, self._x.tobytes(), OFFSET)
        mapping = Mapping(installed, self._file, OFFSET, self._x.nbytes)
        array = ChangingArray(SHAPE, np.uint8, mapping.bytes)
        array.address = mapping.address
        os.truncate(self._file, pages * PAGE)
        return mapping, array

    def close(self) -> None:
        os.close(self._file)


@pytest.fixture
def cut(x: Bytes) -> Iterator[CutFile]:
    file = CutFile(x)
    yield file
    file.close()


def signal_stack() -> int:
    """Return the bytes of this thread's alternate stack for signals, or 0."""
    class Stack(ctypes.Structure):
        _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))
    actual = Stack()
    assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(actual)) == 0
    return 0 if actual.flags & _SS_DISABLE else int(actual.size)


def least_signal_stack() -> int:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return int(getauxval(_AT_MINSIGSTKSZ))


def here(work: Callable[[], None]) -> None:
    work()


def on_another_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


@pytest.mark.parametrize("run", [here, on_another_thread])
def test_a_tile_load_behind_the_end_of_a_file_reads_zeros(plans: dict[str, Plan], x: Bytes, cut: CutFile,
                                                          run: Callable[[Callable[[], None]], None]) -> None:
    """A pixel is that of the file or zeros, and zeros behind the end; the thread goes on."""
    engine = Engine(plans["avx512_amx"])
    whole, zeros = (engine.run({"x": array})["y"] for array in (x, np.zeros_like(x)))
    context = engine.create_context()

    def work() -> None:
        assert signal_stack() == 0 or signal_stack() >= least_signal_stack() > 8192
        for pages in (0, 1, 37, 100):
            mapping, array = cut.mapped(pages)
            assert context.accepts("x", array)
            context.execute_with(ITEMS, {"x": [array]})
            y = context.output("y", ITEMS).copy()
            assert mapping.is_lost
            is_whole, is_zero = ((y == expected).all(-1).ravel() for expected in (whole, zeros))
            assert (is_whole | is_zero).all() and is_zero[(pages * PAGE - OFFSET) // CHANNELS + 1:].all()
            assert is_whole.any() == (pages > 0)
        np.testing.assert_array_equal(engine.run({"x": x})["y"], whole)
    run(work)


def test_helper_threads_read_no_memory_of_clients(plans: dict[str, Plan]) -> None:
    """With several threads an input is copied, by the thread of the request."""
    assert Engine(plans["avx512_amx"]).create_context().zero_copy_inputs == {"x"}
    assert not Engine(plans["avx512_amx"], threads=2).create_context().zero_copy_inputs


def test_faulthandler_has_a_stack_that_a_frame_with_tiles_fits() -> None:
    code = "import faulthandler; faulthandler.enable(); " \
           "from tests.infer_server.test_tiles_in_client_memory import *; print(signal_stack(), least_signal_stack())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    size, least = map(int, done.stdout.split())
    assert size >= least > 8192


SMALL_STACK = """
import ctypes, errno, sys
from infer_server.engines.machine.cpu import detect
class Stack(ctypes.Structure):
    _fields_ = ("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)
memory = ctypes.create_string_buffer(4096)
def use():
    call = ctypes.CDLL(None, use_errno=True).sigaltstack
    return call(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) and errno.errorcode[ctypes.get_errno()]
if sys.argv[1] == "before":
    assert use() == 0
print("amx_tile" in detect().features, detect().tile_refusal or use())
"""


@pytest.mark.parametrize("when, printed", [("before", "False the alternate signal stack of a thread is too small"),
                                           ("after", "True ENOMEM")])
def test_no_thread_has_tiles_and_a_signal_stack_that_is_too_small(when: str, printed: str) -> None:
    """The kernel refuses one of them, so that the plan is compiled for vectors or the library has no such stack."""
    done = subprocess.run([sys.executable, "-c", SMALL_STACK, when], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (printed, 0), done.stderr


# ---- the server
def test_a_request_whose_file_is_cut_short_has_the_error_that_vectors_give(plans: dict[str, Plan], x: Bytes,
                                                                           tmp_path: Path) -> None:
    for target, plan in plans.items():
        (tmp_path / "models" / target / "1").mkdir(parents=True)
        write_plan(plan, tmp_path / "models" / target / "1" / "model.plan")
    key, errors = f"/tiles_{os.getpid()}", []
    expected = Engine(plans["avx512_bf16"]).run({"x": x})["y"]
    handle = shm.create_shared_memory_region("r", key, x.nbytes)
    with serving(tmp_path / "models", load_plan, allow_client_shm=True) as running, \
            tritonclient.http.InferenceServerClient(f"127.0.0.1:{running.ports.http}") as client:
        tensor = tritonclient.http.InferInput("x", list(SHAPE), "UINT8")
        tensor.set_shared_memory("r", x.nbytes)
        for target in plans:
            shm.set_shared_memory_region(handle, [x])
            client.register_system_shared_memory("r", key, x.nbytes)
            np.testing.assert_array_equal(client.infer(target, [tensor]).as_numpy("y"), expected)
            os.truncate(f"/dev/shm{key}", 3 * PAGE)
            with pytest.raises(InferenceServerException) as raised:
                client.infer(target, [tensor])
            errors.append(str(raised.value))
            os.truncate(f"/dev/shm{key}", x.nbytes)
            client.unregister_system_shared_memory("r")
    shm.destroy_shared_memory_region(handle)
    assert "'r' is shorter than it was when it was registered" in errors[0] and errors[0] == errors[1]
