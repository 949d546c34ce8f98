"""Backends are found by target names, and imported when they are chosen."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infer_server.engines.backends import backend_of, device_of, every_target
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.errors import ConfigError, PlanTargetError
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.file import write_plan
from tests.engines.compiler.zoo_engines import compiled
from tests.zoo import TINY


def test_every_target_has_one_backend_whose_sessions_build_for_it() -> None:
    targets = every_target()
    assert len({*targets}) == len(targets) and {"avx2", "portable", "numpy"} <= {*targets}
    for target in targets:
        backend = backend_of(target)
        assert target in backend.targets
        if backend.name == "tensorrt":      # its library may be missing
            continue
        session = backend.session(target, TimingCache(), timing=False)
        assert session.target == target and {"fp32", "int8"} <= {*session.arithmetic}
        assert device_of(backend.name) is device_of(backend.name)


def test_without_a_target_it_is_the_best_of_this_cpu() -> None:
    session = backend_of("").session("", TimingCache(), timing=False)
    assert session.target in backend_of("").targets


def test_a_target_that_nobody_has_is_refused_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"unknown target 'avx512_vni'; did you mean 'avx512_vnni'\?"):
        Builder(BuildConfig(target="avx512_vni"))
    with pytest.raises(ConfigError, match="unknown target 'tpu'; known are .*portable, numpy, .*, cuda"):
        Builder(BuildConfig(target="tpu"))


def test_a_plan_of_a_backend_that_is_not_here_is_refused() -> None:
    with pytest.raises(PlanTargetError, match="for the backend 'nunpy', .*did you mean 'numpy'"):
        device_of("nunpy")


def test_where_llvm_is_missing_the_error_names_it_and_the_way_without(tmp_path: Path) -> None:
    plan = compiled(TINY["explicit_pads"](), tmp_path).plan
    write_plan(plan.with_machine(target="amx9", cpu={"features": ["amx_int4096"]}), tmp_path / "m.plan")
    script = """if True:
        import sys
        sys.modules["llvmlite"] = None              # an import of it raises
        from infer_server.engines import build_engine, load_engine
        from infer_server.engines.errors import ConfigError, PlanTargetError
        for call in (lambda: build_engine("model.onnx", cache=False), lambda: load_engine("m.plan")):
            try:
                call()
            except (ConfigError, PlanTargetError) as error:
                print(type(error).__name__, error)"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": ":".join(sys.path)})
    building, loading = done.stdout.splitlines()
    assert building.startswith("ConfigError cannot build for") and building.endswith("or build for the target 'numpy'")
    assert loading.startswith("PlanTargetError m.plan: made for 'amx9'") and "install llvmlite" in loading
