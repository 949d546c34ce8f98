"""Dependencies between packages follow the layers that ARCHITECTURE.md draws.

Imports are read from the sources. An import at module level costs every user of the module; one inside a function costs
those who call it. The two are told apart: serving a ready plan must not load the compiler, yet may call it when there
is something to compile.
"""
from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.sources import facts

ROOT = Path(__file__).resolve().parents[1]

# Package -> the packages of ours that it may import. The tools of infer_server, which serve nothing, may also import
# calibration and compilers: infer_server.cli, .batch, .comparing and .reducing.
# Packages and rooms are named by their folders: engines.ir is imported as infer_server.engines.ir.
PACKAGES = {
    "engines": {"engines"},
    "calibration": {"calibration", "engines"},
    "protos": {"protos"},
    "clients": {"clients", "protos"},
    "infer_server": {"infer_server", "protos", "engines"},
}

# A room (a folder, or a module beside the folders) -> the rooms that it stands on; it may import these and all that
# they stand on in turn. A package's own modules stand above its folders, unless a line of their own says otherwise.
STANDS_ON: dict[str, tuple[str, ...]] = {
    "engines": (),
    "engines.version": (), "engines.errors": (), "engines.debug": (), "engines.files": (),
    "engines.ir": ("engines.errors",),
    "engines.remote": ("engines.errors",),
    "engines.faults": ("engines.ir",), "engines.preprocess": ("engines.ir",),
    "engines.capacity": ("engines.ir",),
    "engines.machine": ("engines.errors", "engines.version", "engines.files", "engines.remote"),
    # the plan, and serving it
    "engines.plan": ("engines.ir", "engines.machine", "engines.capacity"),
    "engines.plan.symbolic": ("engines.plan", "engines.version"),
    "engines.summary": ("engines.plan",),
    "engines.backends.fallback": ("engines.plan",),
    "engines.backends.base": ("engines.backends.device",), "engines.backends.device": ("engines.plan.symbolic",),
    "engines.backends": ("engines.backends.base", "engines.backends.device"),       # it imports the others by name
    "engines.backends.llvm.runtime": ("engines.backends.device", "engines.backends.fallback"),
    "engines.runtime.host": ("engines.plan",),
    "engines.runtime": ("engines.backends", "engines.capacity", "engines.runtime.host", "engines.summary"),
    "engines.runtime.load": ("engines.runtime",),
    "engines.loading": ("engines.runtime.load",),
    # from a model to an optimised graph
    "engines.ops": ("engines.ir",),
    "engines.frontend.operators": ("engines.ops",),
    "engines.frontend.operators.contrib": ("engines.frontend.operators",),
    "engines.frontend.operators.ml": ("engines.frontend.operators",),
    "engines.frontend": ("engines.frontend.operators.contrib", "engines.frontend.operators.ml", "engines.version",
                         "engines.faults", "engines.capacity"),
    "engines.frontend.cutting": ("engines.frontend", "engines.plan"),
    "engines.frontend.weight_only": ("engines.frontend",),
    "engines.passes.rewriting": ("engines.ops",),
    "engines.passes.rules": ("engines.passes.rewriting",),
    "engines.passes.layout": ("engines.passes.rules",),
    "engines.passes.fusion": ("engines.passes.layout",),
    "engines.passes.quantization": ("engines.passes.fusion",),
    "engines.passes": ("engines.passes.quantization", "engines.debug", "engines.frontend"),
    # from the graph to kernel calls
    "engines.lowering.problems.view": ("engines.ir",),
    "engines.lowering.epilogue": ("engines.ir",),
    "engines.lowering.nest": ("engines.lowering.epilogue",),
    "engines.lowering.problems": ("engines.lowering.nest", "engines.lowering.problems.view"),
    "engines.lowering.calls": ("engines.lowering.problems", "engines.passes.rewriting", "engines.plan"),
    "engines.lowering.rules": ("engines.lowering.calls",),
    "engines.lowering.rules.nests": ("engines.lowering.calls",),
    "engines.lowering": ("engines.lowering.rules", "engines.lowering.rules.nests", "engines.capacity"),
    # from the calls to code
    "engines.codegen": ("engines.ir", "engines.machine"),
    "engines.codegen.row_formulas": ("engines.codegen", "engines.lowering.problems"),
    "engines.codegen.nest": ("engines.codegen", "engines.lowering.problems"),
    "engines.backends.llvm.codegen": (
        "engines.codegen", "engines.backends.llvm.runtime", "engines.lowering.problems.view"),
    "engines.backends.llvm.kernels.kernel": ("engines.backends.llvm.codegen", "engines.lowering.problems"),
    "engines.backends.llvm.kernels.common": ("engines.backends.llvm.kernels.kernel",),
    "engines.backends.llvm.kernels.contraction": ("engines.backends.llvm.kernels.rows",),
    "engines.backends.llvm.kernels.few_couts": ("engines.backends.llvm.kernels.contraction",),
    "engines.backends.llvm.kernels.matrix_unit": ("engines.backends.llvm.kernels.matmul",),
    "engines.backends.llvm.kernels.winograd": ("engines.backends.llvm.kernels.contraction",),
    "engines.backends.llvm.kernels.depthwise": ("engines.backends.llvm.kernels.contraction",),
    "engines.backends.llvm.kernels.rows": ("engines.backends.llvm.kernels.common", "engines.codegen.row_formulas"),
    "engines.backends.llvm.kernels.nest": ("engines.backends.llvm.kernels.common", "engines.codegen.nest"),
    "engines.backends.llvm.kernels.elementwise": (
        "engines.backends.llvm.kernels.rows", "engines.backends.llvm.kernels.nest"),
    "engines.backends.llvm.kernels.matmul": ("engines.backends.llvm.kernels.contraction",),
    "engines.backends.llvm.kernels.movement": ("engines.backends.llvm.kernels.elementwise",),
    "engines.backends.llvm.kernels.pooling": ("engines.backends.llvm.kernels.common",),
    "engines.backends.llvm.kernels.recurrent": ("engines.backends.llvm.kernels.common",),
    "engines.backends.llvm.kernels": (
        "engines.backends.llvm.kernels.depthwise", "engines.backends.llvm.kernels.few_couts",
        "engines.backends.llvm.kernels.matrix_unit",
        "engines.backends.llvm.kernels.movement", "engines.backends.llvm.kernels.pooling",
        "engines.backends.llvm.kernels.recurrent", "engines.backends.llvm.kernels.winograd"),
    "engines.backends.llvm.tuning": ("engines.backends.llvm.kernels", "engines.backends.base"),
    "engines.backends.llvm": ("engines.backends.llvm.tuning", "engines.lowering", "engines.passes.quantization"),
    "engines.backends.cuda.runtime": ("engines.backends.device",),
    "engines.backends.cuda.cost": (),
    "engines.backends.cuda.codegen": ("engines.codegen", "engines.errors"),
    "engines.backends.cuda.kernels.kernel": (
        "engines.backends.cuda.codegen", "engines.backends.cuda.cost", "engines.lowering.problems"),
    "engines.backends.cuda.kernels.access": ("engines.backends.cuda.codegen", "engines.lowering.problems"),
    "engines.backends.cuda.kernels.partial": ("engines.lowering.problems",),
    "engines.backends.cuda.kernels.contraction": (
        "engines.backends.cuda.kernels.kernel", "engines.backends.cuda.kernels.access",
        "engines.backends.cuda.kernels.partial"),
    "engines.backends.cuda.kernels.elementwise": (
        "engines.backends.cuda.kernels.kernel", "engines.backends.cuda.kernels.access",
        "engines.backends.cuda.kernels.partial", "engines.codegen.nest"),
    "engines.backends.cuda.kernels.nest": ("engines.backends.cuda.kernels.elementwise",),
    "engines.backends.cuda.kernels.rows": (
        "engines.backends.cuda.kernels.kernel", "engines.backends.cuda.kernels.access",
        "engines.codegen.row_formulas", "engines.codegen.nest"),
    "engines.backends.cuda.kernels.recurrent": (
        "engines.backends.cuda.kernels.kernel", "engines.backends.cuda.kernels.access"),
    "engines.backends.cuda.kernels.matmul": (
        "engines.backends.cuda.kernels.elementwise", "engines.codegen.row_formulas"),
    "engines.backends.cuda.kernels": (
        "engines.backends.cuda.kernels.contraction", "engines.backends.cuda.kernels.matmul",
        "engines.backends.cuda.kernels.nest", "engines.backends.cuda.kernels.recurrent",
        "engines.backends.cuda.kernels.rows"),
    "engines.backends.cuda": (
        "engines.backends", "engines.backends.cuda.kernels", "engines.backends.cuda.runtime", "engines.lowering"),
    "engines.backends.tensorrt.runtime": ("engines.backends.cuda.runtime",),
    "engines.backends.tensorrt": (
        "engines.backends", "engines.backends.tensorrt.runtime", "engines.frontend", "engines.capacity"),
    "engines.backends.numpy": ("engines.backends", "engines.lowering", "engines.backends.fallback"),
    # all together
    "engines.compiler.weight_only": ("engines.passes", "engines.frontend.weight_only"),
    "engines.compiler": ("engines.backends", "engines.runtime.load", "engines.lowering", "engines.passes",
                         "engines.frontend.cutting", "engines.compiler.weight_only"),
    "engines.onnx_backend": ("engines.compiler",),
    # calibration
    "calibration.histogram": (),
    "calibration.data.sources": ("calibration.data",),
    "calibration.data": (),
    "calibration.accuracy": ("calibration.data",),
    "calibration.calibrators": ("calibration.histogram",),
    "calibration.trials": ("calibration.accuracy",),
    "calibration.target": ("calibration.trials", "calibration.data.sources"),
    "calibration.rounding": ("calibration.histogram",),
    "calibration.weight_only": ("calibration.rounding", "calibration.trials"),
    "calibration": ("calibration.target", "calibration.calibrators", "calibration.weight_only"),
    # the server
    "infer_server.backend": (), "infer_server.errors": (), "infer_server.process": (),
    "infer_server.lifecycle": (), "infer_server.busy_poller": (),
    "infer_server.workers": ("infer_server.errors",), "infer_server.gpu_tensors": ("infer_server.errors",),
    "infer_server.protocol": ("infer_server.errors",),
    "infer_server.observing": ("infer_server.workers", "infer_server.process", "infer_server.protocol"),
    "infer_server.batching": ("infer_server.backend", "infer_server.gpu_tensors", "infer_server.observing"),
    "infer_server.python_backend": ("infer_server.batching", "infer_server.protocol"),
    "infer_server.config": ("infer_server.batching", "infer_server.protocol"),
    "infer_server.rate_limiter": ("infer_server.config",),
    "infer_server.repository": ("infer_server.rate_limiter", "infer_server.workers"),
    "infer_server.repository.kinds": ("infer_server.repository", "infer_server.python_backend"),
    "infer_server.repository.loader": ("infer_server.repository.kinds",),
    "infer_server.repository.checking": ("infer_server.repository.kinds",),
    "infer_server.serving": ("infer_server.repository",),
    "infer_server.endpoints": ("infer_server.serving", "infer_server.process",
                               "infer_server.lifecycle", "infer_server.busy_poller"),
    "infer_server.endpoints.grpc": ("infer_server.endpoints",),
    "infer_server.endpoints.grpc.service": ("infer_server.endpoints.grpc",),
    "infer_server.endpoints.grpc.grpcio": ("infer_server.endpoints.grpc",),
    "infer_server.endpoints.http2": ("infer_server.endpoints",),
    "infer_server.endpoints.grpc.nghttp2": ("infer_server.endpoints.grpc", "infer_server.endpoints.http2"),
    "infer_server.endpoints.status": ("infer_server.endpoints",),
    "infer_server.endpoints.http": ("infer_server.endpoints.status", "infer_server.endpoints.http2"),
    "infer_server.listeners": ("infer_server.endpoints.grpc", "infer_server.endpoints.http"),
    "infer_server.grpc_ports": ("infer_server.listeners", "infer_server.endpoints.grpc.grpcio",
                                "infer_server.endpoints.grpc.nghttp2"),
    "infer_server.frontend_workers": ("infer_server.grpc_ports", "infer_server.endpoints.grpc.service"),
    "infer_server.server": ("infer_server.frontend_workers", "infer_server.repository.loader"),
    "infer_server.ray": ("infer_server.cli",),
    "infer_server.cli": ("infer_server.server", "infer_server.repository.checking"),
    "infer_server.fleet": ("infer_server.batching", "infer_server.cli"),
    "infer_server.comparing": ("infer_server.cli",), "infer_server.reducing": ("infer_server.comparing",),
    "infer_server.reporting": ("infer_server.comparing",),
    "infer_server.cli.inspect_engine": ("infer_server.reporting",),
    "infer_server.cli.build_engine": ("infer_server.cli.inspect_engine",),
    "infer_server.batch": (),
    "infer_server.batch.cli": ("infer_server.batch", "infer_server.cli.build_engine"),
    "infer_server": ("infer_server.process",),
    "protos": (),
    "clients.channels": (),
    "clients": ("clients.channels",),
    "clients.load.transports": ("clients",),
    "clients.load": ("clients.load.transports",),
    "clients.load.mlperf": ("clients.load",),
    "clients.load.cli": ("clients.load.mlperf",),
}
# What serving a ready plan may load; a plan's fallback steps, or a plan for another machine, need more when they run.
SERVING = ("engines", "engines.loading", "engines.preprocess", "engines.runtime", "engines.version",
           "engines.backends.llvm.runtime", "engines.backends.cuda.runtime")
DEFERRED = {"engines.backends.fallback": {"engines.ops"}, "engines.runtime.host": {"engines.ops"},
            "engines.runtime.load": {"engines.compiler"}}

TOOLS = ("infer_server.cli", "infer_server.batch.", "infer_server.comparing", "infer_server.reducing",
         "infer_server.reporting")

# Third-party modules that few may import; everybody else goes through those.
HOMES = {
    "llvmlite": ("engines.backends.llvm", "engines.backends.cuda.codegen"),
    "onnx": ("engines.frontend", "engines.ops.fallback", "engines.onnx_backend", "engines.backends.tensorrt.model",
             "infer_server.cli.build_engine", "infer_server.reducing.fragments"),
}


@dataclass(frozen=True)
class Import:
    """Import of `target` by `module`; `deferred` if it is inside a function."""
    module: str
    target: str
    deferred: bool = False

    def __str__(self) -> str:
        return f"{self.module} imports {self.target}" + (" inside a function" if self.deferred else "")


@cache
def below(room: str) -> frozenset[str]:
    """Return the packages that `room` may import, including itself."""
    return frozenset({room}).union(*(below(lower) for lower in STANDS_ON[room]))


def room_of(module: str) -> str:
    """Return the package of a module, or the module itself if it has its own line in STANDS_ON."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in STANDS_ON), "")


def by_folder(name: str) -> str:
    """Return the name of a module by its folder: engines.ir for infer_server.engines.ir."""
    inner = name.removeprefix("infer_server.")
    return inner if inner.split(".")[0] in PACKAGES else name


def as_imported(name: str) -> str:
    """Return the name by which a module is imported: infer_server.engines.ir for engines.ir."""
    return f"infer_server.{name}" if name.split(".")[0] in set(PACKAGES) - {"infer_server"} else name


def imports(module: str, source: str, modules: frozenset[str], is_package: bool = False) -> Iterator[Import]:
    """Yield every import of a source; `from a import b` imports a.b if that is a module."""
    for node, deferred in facts(source).imports:
        if isinstance(node, ast.Import):
            yield from (Import(module, by_folder(alias.name), deferred) for alias in node.names)
        else:
            # Level 1 is the package that holds the module: for a package's own __init__, that is itself.
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = by_folder(f"{base}.{alias.name}")
                yield Import(module, full if full in modules else by_folder(base), deferred)


def fault(found: Import) -> str | None:
    """Return the violation of an import, or None."""
    package, target = found.module.split(".")[0], found.target.split(".")[0]
    if found.module == "infer_server":      # public names, fetched on first access: test_public_names.py
        return None
    if target in HOMES:
        homes = HOMES[target]
        return None if found.module.startswith(homes) else f"{found}: only {' and '.join(homes)} may"
    if target in ("tests", "scripts"):
        return f"{found}: nothing that is installed may need {target}"
    if target not in PACKAGES:
        return None
    tool = found.module.startswith(TOOLS)
    if target not in PACKAGES[package] and not (tool and target == "calibration"):
        return f"{found}: {package} may import {sorted(PACKAGES[package])} of our packages"
    room, lower = room_of(found.module), room_of(found.target)
    allowed = lower in below(room) or (found.deferred and lower in DEFERRED.get(room, ()))
    if package == target and package != "engines" and not allowed:
        return f"{found}: {room} does not stand on {lower}"
    if package == target == "engines" and room != "engines" and not allowed:
        return f"{found}: {room} does not stand on {lower}"
    serves = package == "infer_server" and not tool
    if serves and target == "engines" and not found.deferred and not any(lower in below(r) for r in SERVING):
        return f"{found}: a server of ready plans must not load the compiler; import it where it is called"
    return None


def sources(*packages: str) -> dict[str, Path]:
    """Return the file of each module of these packages, or of all installed ones."""
    found = {}
    for package in packages or PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_every_import_follows_the_layers() -> None:
    files = sources()
    faults = [text for module, path in files.items()
              for found in imports(module, path.read_text(), frozenset(files), path.stem == "__init__")
              if (text := fault(found))]
    assert not faults, "\n".join(faults)


def test_nothing_imports_a_package_by_the_name_of_its_folder() -> None:
    """Refuse `import engines`, which loads every module again if the checkout is on sys.path."""
    folders = tuple(package for package in PACKAGES if package != "infer_server")
    names = "|".join(folders)
    bare = re.compile(rf"(?<![\w.] )\b(?:from (?:{names})(?:\.\w+)* import|import (?:{names}))\b")
    scanned = [path for folder in (*PACKAGES, "benchmarks", "docs", "examples", "scripts", "tests")
               for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    assert not [f"{path}: {found[0]}" for path in scanned for found in bare.finditer(path.read_text())]


def test_benchmarks_and_scripts_import_no_tests() -> None:
    """Helpers that they share with tests are in scripts/testing, so that neither needs the other."""
    files = sources("benchmarks", "scripts")
    found = [imported for module, path in files.items() for imported in imports(module, path.read_text(), frozenset())]
    assert "scripts.testing" in files and any(imported.target == "scripts.testing.suite" for imported in found)
    assert not [str(imported) for imported in found if imported.target.split(".")[0] == "tests"]
    assert not [module for module, path in files.items() if re.search(r'"-m", "tests\.', path.read_text())]


def test_each_package_is_a_link_in_infer_server() -> None:
    for package in PACKAGES:
        if package != "infer_server":
            assert os.readlink(ROOT / "infer_server" / package) == f"../{package}"


def test_every_folder_is_a_room_and_every_room_is_there() -> None:
    files = sources()
    folders = {module if path.stem == "__init__" else module.rpartition(".")[0] for module, path in files.items()}
    assert not folders - set(STANDS_ON), "say what these stand on"
    assert not set(STANDS_ON) - set(files), "these are not there any more"


def test_serving_stands_on_nothing_that_compiles() -> None:
    serving = frozenset().union(*map(below, SERVING))
    compiling = ("engines.ops", "engines.frontend", "engines.passes", "engines.lowering", "engines.compiler",
                 "engines.codegen", "engines.backends.llvm.codegen", "engines.backends.llvm.kernels",
                 "engines.backends.cuda.codegen", "engines.backends.cuda.kernels")
    assert not [room for room in serving if room.startswith(compiling)]


def test_a_forbidden_import_is_caught() -> None:
    modules = frozenset(sources())
    forbidden = {
        "engines.passes.bad": "from infer_server.engines.backends.llvm import backend",
        "engines.passes.fusion.bad": "from ...backends import llvm",
        "engines.ir.graph": "from infer_server.engines import ops",
        "engines.runtime.engine": "import infer_server.engines.ops.reference",
        "engines.plan.plan": "def read():\n    from infer_server.engines.frontend import onnx_import",
        "engines.plan.file": "import onnx",
        "engines.plan.arena": "import llvmlite.ir",
        "engines.compiler.bad": "def run():\n    from infer_server.engines.loading import load_engine",
        "engines.loading": "def relower():\n    from infer_server.engines.compiler import specialise",
        "engines.runtime.load.bad": "from infer_server.engines.compiler import specialise",
        "engines.compiler.builder": "from infer_server.calibration.table import CalibrationTable",
        "engines.backends.llvm.kernels.rows.bad":
            "from infer_server.engines.backends.llvm.kernels.movement import gather",
        "engines.backends.llvm.kernels.movement.bad": "from infer_server.engines.ops import resize",
        "engines.backends.llvm.runtime.bad": "from infer_server.engines.runtime import engine",
        "engines.backends.numpy.bad": "def run():\n    from infer_server.engines.runtime.host import host",
        "engines.backends.llvm.kernels.common.bad": "from infer_server.engines.backends.llvm.tuning import timing",
        "engines.lowering.rules.bad":
            "from infer_server.engines.backends.llvm.kernels.movement import gather",
        "engines.lowering.problems.bad": "from infer_server.engines.lowering.calls import calls",
        "engines.backends.llvm.codegen.bad": "from infer_server.engines.backends.llvm.tuning import tuner",
        "engines.backends.cuda.runtime.bad": "from infer_server.engines.backends.cuda.codegen import gpu",
        "engines.backends.cuda.kernels.bad":
            "from infer_server.engines.backends.llvm.kernels import kernel",
        "clients.load.bad": "from infer_server.engines import load_engine",
        "clients.bad": "from infer_server.clients.load import cli",
        "protos.bad": "import infer_server",
        "infer_server.repository.bad": "from infer_server.calibration import table",
        "infer_server.batching.bad": "from infer_server.repository import model",
        "infer_server.batching.batcher": "from infer_server.engines.compiler.builder import build",
        "calibration.bad": "from tests import digits",
    }
    for module, source in forbidden.items():
        assert any(fault(found) for found in imports(module, source, modules)), f"{module}: {source}"


def test_an_allowed_import_is_not_caught() -> None:
    allowed = {
        "engines.backends.llvm.kernels.rows.good":
            "from infer_server.engines.backends.llvm.kernels.common import access",
        "engines.backends.llvm.backend": "from infer_server.engines.plan.plan import Step\nimport llvmlite.binding",
        "engines.frontend.onnx_import": "import onnx\nfrom engines.ir.graph import Graph",
        "engines.backends.fallback": "def step():\n    from infer_server.engines.ops import reference",
        "infer_server.cli.build_engine":
            "from infer_server.calibration import table\nfrom engines.compiler.builder import build",
        "infer_server.batching.batcher": "from infer_server.engines import load_engine",
        "clients.client": "import numpy\nfrom protos import service",
    }
    modules = frozenset(sources())
    for module, source in allowed.items():
        assert [fault(found) for found in imports(module, source, modules) if fault(found)] == [], f"{module}: {source}"
