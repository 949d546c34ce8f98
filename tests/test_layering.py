"""Who may import whom, as ARCHITECTURE.md draws it: read from the sources, so that imports inside functions count too.

An import at module level costs every user of the module; one inside a function costs those who call it. The two are
told apart: serving a ready plan must not load the compiler, yet may call it when there is something to compile.
"""
from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Package -> the packages of ours that it may import. infer_server.cli may also import calibration.
PACKAGES = {
    "engines": {"engines"},
    "calibration": {"calibration", "engines"},
    "protos": {"protos"},
    "clients": {"clients", "protos"},
    "infer_server": {"infer_server", "protos", "engines"},
}

# Inside engines: a module may import what its layer stands on, and all that this stands on in turn.
STANDS_ON = {
    "version": (), "errors": (), "tables": (), "clock": (),
    "debug": (),
    "ir": ("errors",),
    "faults": ("ir",),
    "capacity": ("ir",),
    "packed": ("ir",),
    "plan": ("packed",),
    "roofline": ("plan",),
    # compiling
    "shapes": ("ir",),
    "ops": ("shapes",),
    "serialize": ("ir",),
    "reference": ("ops",),
    "frontend": ("reference", "version", "faults", "capacity"),
    "passes": ("frontend", "debug"),
    "tactics": ("version", "errors", "clock"),
    "backends": ("passes", "serialize", "tactics", "roofline", "tables", "cpu", "loader", "memory"),
    "bands": ("execution", "tactics"),
    "builder": ("backends", "bands"),
    "onnx_backend": ("builder", "runtime"),
    # serving
    "cpu": ("errors",),
    "loader": ("errors",),
    "records": (),
    "derived": ("memory",),
    "verification": ("plan",),
    "checksums": (),
    "sections": ("checksums", "memory"),
    "planfile": ("records", "sections", "verification"),
    "memory": ("plan",),
    "fallback": ("plan",),
    "execution": ("verification", "derived", "tables", "clock", "loader", "fallback"),
    "schedule": ("execution",),
    "parallel": ("schedule",),
    "runtime": ("planfile", "cpu", "parallel"),
    "cache": ("planfile", "version"),
}
# Where code is loaded stands beside where it is made, and is all of a backend that serving needs.
LOADERS = ("engines.backends.llvm.elf",)
# Allowed inside a function only: what a plan needs that is not ready to run as it is.
DEFERRED = {"fallback": {"reference", "serialize"}, "runtime": {"builder"}}


def below(layer: str) -> set[str]:
    """The layers that `layer` may import, itself included."""
    return {layer}.union(*(below(lower) for lower in STANDS_ON[layer]))


SERVING = below("runtime")

# Third-party modules that few may import; everybody else goes through those.
HOMES = {
    "llvmlite": ("engines.backends.llvm",),
    "onnx": ("engines.frontend", "engines.ops.fallback", "engines.onnx_backend", "infer_server.cli.build_engine"),
}


@dataclass(frozen=True)
class Import:
    """`module` imports `target`; `deferred` if it stands inside a function."""
    module: str
    target: str
    deferred: bool = False

    def __str__(self) -> str:
        return f"{self.module} imports {self.target}" + (" inside a function" if self.deferred else "")


def imports(module: str, source: str, modules: frozenset[str], is_package: bool = False) -> Iterator[Import]:
    """Every import statement of the source; `from a import b` is an import of a.b where that is a module."""
    tree = ast.parse(source)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inner = {child for node in ast.walk(tree) if isinstance(node, functions) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, node in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Level 1 is the package that holds the module: for a package's own __init__, that is itself.
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(module, full if full in modules else base, node in inner)


def engine_layer(module: str) -> str:
    """engines.passes.fuse -> passes; engines itself is the public face of runtime."""
    parts = module.split(".")
    return "loader" if module in LOADERS else parts[1] if len(parts) > 1 else "runtime"


def may_import_engine(layer: str, target: str, deferred: bool) -> bool:
    return target in below(layer) or (deferred and target in DEFERRED.get(layer, ()))


def fault(found: Import) -> str | None:
    """What is wrong with the import, or None."""
    package, target = found.module.split(".")[0], found.target.split(".")[0]
    if target in HOMES:
        homes = HOMES[target]
        return None if found.module.startswith(homes) else f"{found}: only {' and '.join(homes)} may"
    if target in ("tests", "scripts"):
        return f"{found}: nothing that is installed may need {target}"
    if target not in PACKAGES:
        return None
    tool = found.module.startswith("infer_server.cli")
    if target not in PACKAGES[package] and not (tool and target == "calibration"):
        return f"{found}: {package} may import {sorted(PACKAGES[package])} of our packages"
    if package == target == "engines" and engine_layer(found.module) in STANDS_ON:
        layer, lower = engine_layer(found.module), engine_layer(found.target)
        if not may_import_engine(layer, lower, found.deferred):
            return f"{found}: {layer} does not stand on {lower}"
    serves = package == "infer_server" and not tool
    if serves and target == "engines" and not found.deferred and engine_layer(found.target) not in SERVING:
        return f"{found}: a server of ready plans must not load the compiler; import it where it is called"
    return None


def sources() -> dict[str, Path]:
    """Module name -> file, for all that is installed."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_every_import_follows_the_layers() -> None:
    files = sources()
    faults = [text for module, path in files.items() if not path.stem.endswith(("_pb2", "_pb2_grpc"))
              for found in imports(module, path.read_text(), frozenset(files), path.stem == "__init__")
              if (text := fault(found))]
    assert not faults, "\n".join(faults)


def test_every_module_of_engines_has_a_layer() -> None:
    unknown = [module for module in sources()
               if module.startswith("engines.") and engine_layer(module) not in STANDS_ON]
    assert not unknown, f"say in ARCHITECTURE.md, then here, what these stand on: {unknown}"


def test_serving_stands_on_nothing_that_compiles() -> None:
    assert SERVING.isdisjoint({"shapes", "ops", "reference", "frontend", "passes", "tactics", "backends", "builder"})


def test_a_forbidden_import_is_caught() -> None:
    modules = frozenset({"engines.passes.rewrite", "engines.backends.llvm", "engines.ops.conv", "engines.runtime"})
    forbidden = {
        "engines.passes.bad": "from engines.backends.llvm import lower",
        "engines.passes.fusions.bad": "from ...backends import llvm",
        "engines.ir": "from engines import ops",
        "engines.runtime": "import engines.reference",
        "engines.plan": "def read():\n    from engines.frontend import onnx_import",
        "engines.planfile": "import onnx",
        "engines.memory": "import llvmlite.ir",
        "engines.builder": "from calibration.table import CalibrationTable",
        "clients.load.bad": "from engines import load_engine",
        "protos.bad": "import infer_server",
        "infer_server.repository": "from calibration import table",
        "infer_server.batcher": "from engines.builder import build",
        "calibration.bad": "from tests import digits",
    }
    for module, source in forbidden.items():
        known = modules | {"engines.ops"}
        assert any(fault(found) for found in imports(module, source, known)), f"{module}: {source}"


def test_an_allowed_import_is_not_caught() -> None:
    allowed = {
        "engines.backends.llvm.lower": "from engines.plan import Step\nimport llvmlite.binding",
        "engines.frontend.onnx_import": "import onnx\nfrom engines.ir import Graph",
        "engines.fallback": "def step():\n    from engines import reference",
        "infer_server.cli.build_engine": "from calibration import table\nfrom engines.builder import build",
        "infer_server.batcher": "from engines import load_engine",
        "clients.client": "import numpy\nfrom protos import service",
    }
    for module, source in allowed.items():
        known = frozenset({"engines.plan", "engines.reference"})
        assert [fault(found) for found in imports(module, source, known) if fault(found)] == [], f"{module}: {source}"
