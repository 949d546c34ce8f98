"""Files, modules, classes, functions, fields and commands that the documents name exist."""
from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.sources import facts
from tests.test_layering import PACKAGES, ROOT, as_imported, by_folder, sources

DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in
                   (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")))
SPAN = re.compile(r"`([^`\n]+)`")
PICTURE = re.compile(r"^ {4}.*$", re.MULTILINE)
PATH = re.compile(r"(?<![\w./<-])((?:engines|calibration|infer_server|protos|clients|benchmarks|tests|scripts|docs|"
                  r"examples)(?:/[\w.-]+)+)")
LINK = re.compile(r"\]\([^)\s]+\)")
COMMAND = re.compile(r"python3? -m ([\w.]+)")
DOTTED = re.compile(r"(?<![\w./$-])([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
CAMEL = re.compile(r"(?<![\w./])((?:[A-Z][a-z0-9]+){2,})(?![\w/])")
# Of others, or of ONNX: the documents name them too.
FOREIGN = {"grpc.health.v1", "BatchNormalization", "inference.GRPCInferenceService", "client.load_model", "host.name"}


@cache
def defined() -> tuple[frozenset[str], frozenset[str]]:
    """Return modules and packages, and `module.name` and `Class.name` of everything in them."""
    files = sources(*PACKAGES, "benchmarks", "scripts", "tests")
    held = {f"{module}.{name}" for module, path in files.items() for name in facts(path.read_text()).names}
    return frozenset(files), frozenset(held)


@cache
def listed() -> tuple[str, str, frozenset[str]]:
    """Return all names, and those of classes, a line each, and the parts of the modules' names."""
    modules, held = defined()
    classes = {last for whole in held if (last := whole.rpartition(".")[2])[:1].isupper() and not last.isupper()}
    lines = ("\n" + "".join(f"{name}\n" for name in names) for names in ((*modules, *held), classes))
    return *lines, frozenset(part for module in modules for part in module.split("."))


@cache
def known(name: str) -> bool:
    """Return True if a name exists.

    `frontend.onnx_import` ends a module's name, `Graph.dependence` is a class's field, and `context.execute` a method
    of a class whose name ends in Context.
    """
    names, name = listed()[0], by_folder(name)
    return any(f"{line}\n" in names for line in (f"\n{name}", f".{name}", f"{name[0].upper()}{name[1:]}"))


@cache
def ours(name: str) -> bool:
    """Return True if a dotted name begins with a package, module or class of ours, or an instance of one."""
    first = name.split(".")[0]
    _, classes, parts = listed()
    return first in parts or f"{first[0].upper()}{first[1:]}\n" in classes


def faults(text: str) -> Iterator[str]:
    """Yield the names in a text that do not exist; tests/docs checks links."""
    text = LINK.sub("]", text)
    for path in PATH.findall(text):
        if not (ROOT / path.rstrip(".")).exists():
            yield path
    for module in COMMAND.findall(text):
        first = module.split(".")[0]
        if first in (*PACKAGES, "benchmarks", "scripts", "tests") and (
                module != as_imported(by_folder(module)) or not known(module)):
            yield f"python -m {module}"
    yield from dotted_faults("\n".join(SPAN.findall(text)))


def dotted_faults(text: str) -> Iterator[str]:
    files = (".py", ".md", ".onnx", ".plan", ".npz", ".json", ".toml", ".txt", ".yaml", ".cfg")
    yield from (name for name in DOTTED.findall(COMMAND.sub("", text))
                if ours(name) and name not in FOREIGN and not name.endswith(files) and not known(name))


def architecture_faults(text: str) -> Iterator[str]:
    """Yield the faults of `faults`, of names in pictures, and of classes in backticks."""
    yield from faults(text)
    pictures = "\n".join(PICTURE.findall(text))
    yield from dotted_faults(pictures)
    words = CAMEL.findall("\n".join([pictures, *SPAN.findall(text)]))
    yield from (name for name in words if name not in FOREIGN and not known(name))


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "ARCHITECTURE.md"])
def test_what_a_document_names_is_there(document: str) -> None:
    assert not list(faults((ROOT / document).read_text()))


def test_what_the_architecture_names_is_there() -> None:
    assert not list(architecture_faults(Path(ROOT, "ARCHITECTURE.md").read_text()))


@pytest.mark.parametrize("text, name", [
    ("see engines/ir/gone.py", "engines/ir/gone.py"), ("    python -m benchmarks.gone x", "python -m benchmarks.gone"),
    ("    python -m clients.load.cli", "python -m clients.load.cli"),
    ("`infer_server.engines.ops.gone`", "infer_server.engines.ops.gone"),
    ("`engines.ops.gone`", "engines.ops.gone"), ("`Graph.gone`", "Graph.gone"), ("`node.gone`", "node.gone"),
    ("`GoneContext`", "GoneContext"), ("    a ─passes.gone→ b", "passes.gone"), ("    x ─→ GoneGraph", "GoneGraph")])
def test_a_name_that_is_gone_is_found(text: str, name: str) -> None:
    assert list(architecture_faults(text)) == [name]


@pytest.mark.parametrize("text", [
    "`engines/ir/graph.py` and `engines.ir.graph`", "`passes.pipeline.simplify`",
    "`infer_server.engines.errors.EngineError`", "    python -m infer_server.clients.load.cli",
    "`node.precision`", "`ModelError`", "`np.zeros`, `os.path.join`", "    x ─frontend.onnx_import→ Graph",
    "/path/to/engines/no/file.py"])
def test_a_name_that_is_there_or_of_others_is_not_found(text: str) -> None:
    assert not list(architecture_faults(text))
