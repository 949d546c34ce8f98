"""`from infer_server import ...`: the public names, and the one name that a wheel installs."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import infer_server

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("infer_server", "engines", "calibration", "clients", "protos")


def output_of(program: str, *path: str, folder: Path) -> str:
    """Return the standard output of a Python program in a folder, with this checkout at the end of sys.path."""
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, *filter(None, sys.path)])})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_public_name_is_there() -> None:
    assert set(infer_server.__all__) <= set(dir(infer_server))
    for name in infer_server.__all__:
        assert getattr(infer_server, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'infer_server' has no attribute 'bulid_engine'"):
        _ = infer_server.bulid_engine


def test_importing_the_package_imports_nothing_else(tmp_path: Path) -> None:
    program = """if True:
        import sys, infer_server
        print(sorted(set(sys.modules) & {"numpy", "onnx", "llvmlite", "google.protobuf", "asyncio"}),
              [name for name in sys.modules if name.startswith("infer_server.")])"""
    assert output_of(program, folder=tmp_path) == "[] []\n"


def test_folders_of_the_user_do_not_shadow_ours(tmp_path: Path) -> None:
    for package in ("engines", "calibration", "clients", "protos", "benchmarks", "tests"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('of the user')")
    program = """if True:
        from infer_server import Calibration, InferenceClient, Server, build_engine, load_engine
        from infer_server.cli import build_engine, inspect_engine, run_engine, serve
        from infer_server.clients.load import cli
        InferenceClient("localhost:1").close()
        print("imported")"""
    assert output_of(program, str(tmp_path), folder=tmp_path) == "imported\n"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what distributions are made from: building writes into its folder."""
    copy = tmp_path_factory.mktemp("checkout")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def built(what: str, folder: Path, into: Path) -> Path:
    """Build "wheel" or "sdist" with the setuptools that is installed, as pip does without isolation."""
    pytest.importorskip("setuptools", minversion="77", reason="a license expression is read by setuptools 77 or newer")
    program = f"from setuptools.build_meta import build_{what}; print(); print(build_{what}({str(into)!r}))"
    return into / output_of(program, folder=folder).splitlines()[-1]


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_a_wheel_from_the_checkout_or_from_the_sdist_holds_infer_server_only(checkout: Path, tmp_path: Path) -> None:
    wheel = files_of(built("wheel", checkout, tmp_path))
    sources = {path.relative_to(checkout).as_posix() for package in PACKAGES
               for path in (checkout / package).rglob("*") if path.is_file()}
    assert wheel == {name if name.startswith("infer_server/") else f"infer_server/{name}" for name in sources}

    with tarfile.open(built("sdist", checkout, tmp_path)) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    (tmp_path / "again").mkdir()
    assert files_of(built("wheel", unpacked, tmp_path / "again")) == wheel
