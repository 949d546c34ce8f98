"""Plans for GPUs are built without a GPU, and run by the real runtime on the emulated one."""
from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infer_server.engines.backends import gpus_here
from infer_server.engines.backends.cuda.codegen.gpu import GPUS
from infer_server.engines.backends.cuda.runtime.code import CUDA_OF_PTX
from infer_server.engines.backends.cuda.runtime.device import DEVICE, CudaDevice
from infer_server.engines.backends.cuda.runtime.holdings import GpuResources, ScopedResources
from infer_server.engines.backends.cuda.runtime.library import CudaMemoryError, list_gpus
from infer_server.engines.backends.cuda.runtime.sharing import SharedMemory
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.errors import ConfigError, InputError, PlanError, PlanTargetError
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.file import read_plan, write_plan
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.load.create import engine_of
from infer_server.engines.runtime.load.options import LoadOptions
from scripts.testing.gpu.emulated import DeviceArray, EmulatedGpu, install
from scripts.testing.gpu.libcuda.library import IMAGE, NO_BINARY, OLD, TEXTS, used
from tests.engines.compiler.small_models import node, small_model
from tests.gpu.network import MODEL, Plans
from tests.zoo import images_for

Here = Callable[..., EmulatedGpu]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Here:
    """Return a function that gives this machine an emulated GPU."""
    def put(architecture: str, **options: int) -> EmulatedGpu:
        found = EmulatedGpu(architecture, **options)
        install(monkeypatch, found)
        return found
    return put


@pytest.mark.parametrize("target", ["sm_61", "sm_75", "sm_80", "sm_90a"])
def test_a_quantised_network_gives_the_bytes_of_the_plan_for_a_cpu(target: str, gpu: Here,
                                                                 plans: Plans) -> None:
    gpu(target)
    x = {"input": images_for(MODEL, 3, seed=1)}
    theirs, ours = Engine(plans("portable")).run(x), Engine(plans(target)).run(x)
    for output, value in theirs.items():
        assert value.std() > 0
        np.testing.assert_array_equal(ours[output], value)


def test_contexts_of_one_device_do_not_meet_and_batches_run_by_the_graph_of_their_bucket(
        gpu: Here, plans: Plans) -> None:
    here = gpu("sm_80")
    engine = Engine(plans("sm_80"))
    x = images_for(MODEL, 4, seed=1)
    wanted = Engine(plans("portable")).run({"input": x})
    (name, values), = wanted.items()
    contexts = [engine.create_context(), engine.create_context()]
    for context, first in zip(contexts, (0, 1), strict=True):
        context.input("input", 1)[...] = x[first:first + 1]
    for context, first in zip(contexts, (0, 1), strict=True):
        context.execute(1)
        np.testing.assert_array_equal(context.output(name, 1), values[first:first + 1])
    contexts[0].input("input", 3)[...] = x[1:]
    contexts[0].execute(3)          # of a bucket of four: what the slot behind holds makes no difference
    np.testing.assert_array_equal(contexts[0].output(name, 3), values[1:])
    for context in contexts:
        context.close()
        with pytest.raises(InputError, match="the context is closed"):
            context.execute(1)
    del contexts, context       # and with them what was asked of their slots
    assert here.pinned_bytes == 0 and len(here.allocated) == 1      # the constants
    del engine
    assert not here.allocated and not here.modules


def test_too_little_memory_is_said(gpu: Here, plans: Plans) -> None:
    plan = plans("sm_80")
    gpu("sm_80", size=len(plan.machine.constants) // 2)
    with pytest.raises(PlanError, match=r"not enough memory for its constants \(.* bytes\) .* of this GPU"):
        Engine(plan)
    gpu("sm_80", size=len(plan.machine.constants) + (16 << 10))
    engine = Engine(plan)
    with pytest.raises(PlanError, match="not enough memory for the buffers of a context.*reduce --max-batch"):
        engine.create_context()
    gpu("sm_80").pinned = refuse        # type: ignore[method-assign]
    with pytest.raises(PlanError, match="not enough memory for .* bytes of pinned memory for 'input'"):
        Engine(plan).create_context()


def refuse(size: int) -> Array:
    raise CudaMemoryError("out of memory (2)")


def test_a_lost_device_is_an_error_and_closing_what_is_on_it_is_none(gpu: Here, plans: Plans) -> None:
    here = gpu("sm_80")
    engine = Engine(plans("sm_80"))
    context = engine.create_context()
    here.lost = True
    with pytest.raises(PlanError, match="unspecified launch failure"):
        context.execute(1)
    with pytest.raises(PlanError, match="unspecified launch failure"):
        engine.create_context()
    with pytest.raises(PlanError, match="unspecified launch failure"):
        Engine(plans("sm_80"))
    context.close()
    engine.close()


def test_what_is_let_go_of_leaves_the_gpu_that_the_thread_has() -> None:
    own, other = EmulatedGpu("sm_80"), EmulatedGpu("sm_80")
    memory, owner = SharedMemory(other, other.share(other.allocate(8))), set[int]()
    GpuResources(other, owner).allocate(8)
    own.use()
    del memory
    assert used() is own.cuda and not other.opened
    del owner
    assert used() is own.cuda and len(other.allocated) == 1


def test_what_was_held_for_a_block_keeps_nothing_of_a_gpu_after_it() -> None:
    gpu = EmulatedGpu("sm_80")
    with ScopedResources(gpu) as held:
        held.allocate(8)
        assert len(gpu.allocated) == 1
    assert not gpu.allocated
    forgotten = weakref.ref(gpu)
    del gpu, held
    gc.collect()
    assert forgotten() is None


def test_inputs_and_outputs_may_be_arrays_on_the_gpu(gpu: Here, plans: Plans) -> None:
    here, plan = gpu("sm_80"), plans("sm_80")
    x = images_for(MODEL, 3, seed=1)
    wanted = Engine(plans("portable")).run({"input": x})
    (name, values), = wanted.items()
    context, array, result = Engine(plan).create_context(), DeviceArray(here, x), DeviceArray(here, values * 0)
    context.bind("input", array)
    context.bind(name, result)
    context.input("input", 3)[...] = 7      # nobody reads the slots
    context.execute(3)                      # of a bucket of four: no byte behind the arrays is touched
    np.testing.assert_array_equal(result.host(), values)
    assert not context.output(name, 3).any()
    context.bind(name, None)
    here.write(array.address, x[::-1])
    context.execute(2)
    np.testing.assert_array_equal(context.output(name, 2), values[::-1][:2])
    with pytest.raises(InputError, match="batch 4, but 'input' is bound to an array of 3 items"):
        context.execute(4)
    elsewhere = DeviceArray(here, x)
    elsewhere.__cuda_array_interface__["data"] = 7, False
    for wrong, why in ((DeviceArray(here, x.astype(np.float64)), "it is float64, the model has float32"),
                       (DeviceArray(here, x[0]), r"its shape is \[3, 16, 16\], the model has \[batch, 3, 16, 16"),
                       (elsewhere, "not in the memory of this GPU"),
                       (x, "it is in host memory")):
        with pytest.raises(InputError, match=why):
            context.bind("input", wrong)
    with pytest.raises(InputError, match="it is read-only"):
        context.bind(name, DeviceArray(here, values, read_only=True))
    with pytest.raises(InputError, match=r"lies on a GPU.*context\.bind\('input'"):
        Engine(plan).run({"input": array})
    with pytest.raises(ConfigError, match="the plan runs on the CPU"):
        Engine(plans("portable")).create_context().bind("input", array)


def test_a_plan_runs_on_the_gpu_of_its_number(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    here = [EmulatedGpu("sm_75"), EmulatedGpu("sm_80")]
    install(monkeypatch, *here)
    with pytest.raises(PlanTargetError, match="this GPU is sm_75, which is older"):
        engine_of(plans("sm_80"), LoadOptions(on_target_mismatch="refuse"))
    engine = engine_of(plans("sm_80"), LoadOptions(on_target_mismatch="refuse", gpu=1))
    assert not here[0].allocated and here[1].allocated
    assert engine.plan.machine.target == "sm_80"


@pytest.mark.parametrize(("target", "here", "why"), [
    ("sm_80", "sm_75", "this GPU is sm_75, which is older"),
    ("sm_90a", "sm_100", "runs on no other architecture, but this GPU is sm_100"),
    ("sm_80", "sm_89", ""), ("sm_90a", "sm_90", "")])
def test_a_plan_fits_gpus_of_its_kind_and_later_ones(target: str, here: str, why: str, gpu: Here,
                                                   plans: Plans) -> None:
    gpu(here)
    found = DEVICE.mismatch(plans(target))
    assert why in found if why else found == ""


def test_what_is_built_for_each_gpu_of_a_machine_is_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"sm_75": "sm_75", "sm_87": "sm_86", "sm_90": "sm_90a", "sm_103": "sm_100", "sm_52": ""}
    install(monkeypatch, *map(EmulatedGpu, targets))
    assert [(gpu.architecture, target) for gpu, target in gpus_here()] == list(targets.items())
    install(monkeypatch, EmulatedGpu("sm_52"))
    with pytest.raises(ConfigError, match="that is sm_52, which is older than all that there are kernels for: sm_61"):
        Builder(BuildConfig(target="cuda"))


@pytest.mark.parametrize(("refusal", "lazy"), [(IMAGE, False), (NO_BINARY, False), (OLD, False), (NO_BINARY, True)])
def test_a_driver_that_does_not_take_the_machine_code_compiles_the_ptx(
        refusal: int, lazy: bool, gpu: Here, plans: Plans, caplog: pytest.LogCaptureFixture) -> None:
    here, plan, x = gpu("sm_80"), with_cubin(plans("sm_80")), {"input": images_for(MODEL, 1, seed=1)}
    here.takes_cubins, here.cuda.refusal, here.cuda.lazy = True, refusal, lazy
    engine = Engine(plan)
    call = "cuModuleGetFunction" if lazy else "cuModuleLoadDataEx"
    assert f"{call}: {TEXTS[refusal]} ({refusal})" in caplog.text and "the PTX is compiled" in caplog.text
    assert here.modules == 1
    for name, value in Engine(plans("portable")).run(x).items():
        np.testing.assert_array_equal(engine.run(x)[name], value)


def test_a_driver_that_takes_none_of_the_code_is_an_error_that_says_which_one_does(
        gpu: Here, plans: Plans) -> None:
    here = gpu("sm_90a")
    here.takes_cubins, here.cuda.ptx, here.cuda.version = True, 7.4, 11040
    with pytest.raises(PlanTargetError, match=r"driver here, of CUDA 11\.4, rejects the kernels: .*unsupported "
                       r"toolchain\. \(222\); PTX 8\.4 needs a driver of CUDA 12\.4 or later"):
        Engine(with_cubin(plans("sm_90a")))
    assert not here.allocated and not here.modules
    assert {f"{gpu.ptx / 10}" for gpu in GPUS.values() if gpu.ptx / 10 > here.cuda.ptx} == CUDA_OF_PTX.keys()


def with_cubin(plan: Plan) -> Plan:
    *_, ptx = plan.machine.code
    return replace(plan, machine=replace(plan.machine, code=(b"\x7fELF of a later CUDA", ptx)))


def test_without_a_driver_the_error_says_so_and_the_plan_is_compiled_for_the_cpu(
        plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_server.engines.backends.cuda.runtime.library.LIBRARY", "libcuda-that-is-not-here.so")
    plan, x = plans("sm_80"), {"input": images_for(MODEL, 2, seed=1)}
    assert list_gpus() == []
    assert "no NVIDIA driver is installed (libcuda-that-is-not-here.so" in CudaDevice().mismatch(plan)
    monkeypatch.setattr(DEVICE, "open_gpu", CudaDevice().open_gpu)
    with pytest.raises(PlanTargetError, match="no NVIDIA driver"):
        engine_of(plan, LoadOptions(on_target_mismatch="refuse"))
    with pytest.raises(ConfigError, match="target 'cuda' is the GPU of this machine, but no NVIDIA driver"):
        Builder(BuildConfig(target="cuda"))
    for name, value in engine_of(plan).run(x).items():
        np.testing.assert_array_equal(value, Engine(plans("portable")).run(x)[name])


def test_serving_a_plan_for_a_gpu_needs_no_compiler(plans: Plans, tmp_path: Path) -> None:
    write_plan(plans("sm_80"), tmp_path / "m.plan")
    assert read_plan(tmp_path / "m.plan").machine == plans("sm_80").machine
    x = images_for(MODEL, 2, seed=1)
    np.save(tmp_path / "x.npy", x)
    script = """if True:
        import sys
        sys.modules.update(dict.fromkeys(["llvmlite", "onnx", "infer_server.engines.lowering"]))      # none is there
        import numpy as np
        from infer_server.engines import load_engine
        from infer_server.engines.backends.cuda.runtime.device import DEVICE
        from scripts.testing.gpu.emulated import EmulatedGpu, machine_with
        vars(DEVICE).update(machine_with(EmulatedGpu("sm_80")))
        engine = load_engine("m.plan", on_target_mismatch="refuse")
        np.savez("y.npz", **engine.run({"input": np.load("x.npy")}))"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, env={"PYTHONPATH": ":".join(sys.path)})
    for name, value in Engine(plans("portable")).run({"input": x}).items():
        np.testing.assert_array_equal(np.load(tmp_path / "y.npz")[name], value)


def test_what_no_kernel_runs_is_refused_by_its_name_with_the_reason() -> None:
    inverse = small_model([node("Det", "x", "y")], {"x": ["N", 3, 3]}, ["y"])
    tall = small_model([node("GRU", "x w r", "y", hidden_size=1056)], {"x": [2, 1, 3]}, ["y"],
                       {"w": np.ones((1, 3168, 3), np.float32), "r": np.ones((1, 3168, 1056), np.float32)})
    builder = Builder(BuildConfig(target="sm_80"))
    with pytest.raises(ConfigError, match=r"'det' \(Det\) cannot run on sm_80: .*a plan for a GPU runs nothing"):
        builder.plan(builder.graph(inverse))
    with pytest.raises(ConfigError, match=r"cannot run on sm_80: a recurrent layer of more than 1024 units"):
        builder.plan(builder.graph(tall))
