"""Limits on the size of folders, modules and functions, and no import cycles."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.sources import facts
from tests.test_layering import PACKAGES, ROOT, imports, sources

MODULES_OF_A_FOLDER = 12
LINES_OF_A_MODULE = 400
LINES_OF_A_FUNCTION = 50
# One file for each kind of thing: these grow with ONNX and not with what we thought up.
CATALOGUES = ("engines/ops", "engines/passes/rules", "engines/lowering/rules")


def crowded(paths: Iterable[str]) -> list[str]:
    """Return the folders with more modules than the limit, without __init__ and __main__."""
    counts = Counter(path.rpartition("/")[0] for path in paths
                     if not path.endswith(("/__init__.py", "/__main__.py")))
    return [f"{folder}: {count} modules" for folder, count in counts.items()
            if count > MODULES_OF_A_FOLDER and folder not in CATALOGUES]


def too_long(name: str, source: str) -> Iterator[str]:
    # An import statement counts as one line, however it is wrapped.
    held = facts(source)
    lines = source.count("\n") - sum((node.end_lineno or node.lineno) - node.lineno for node, _ in held.imports)
    if lines > LINES_OF_A_MODULE:
        yield f"{name}: {lines} lines"
    for function, length in held.functions:
        if length > LINES_OF_A_FUNCTION:
            yield f"{name}: {function} has {length} lines"


def circle(modules: Mapping[str, str]) -> list[str]:
    """Return modules that import each other when loaded, or []; imports inside functions do not count."""
    names = frozenset(modules)
    needs = {name: {found.target for found in imports(name, source, names) if not found.deferred} & names - {name}
             for name, source in modules.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def read() -> dict[str, tuple[str, str]]:
    """Return the path from the root and the source of each module, benchmarks included."""
    files = sources(*PACKAGES, "benchmarks")
    return {name: (str(path.relative_to(ROOT)), path.read_text()) for name, path in files.items()}


def test_no_folder_holds_more_modules_than_a_reader_takes_in() -> None:
    assert not crowded(path for path, _ in read().values())


def test_no_module_and_no_function_is_too_long() -> None:
    assert not [fault for path, source in read().values() for fault in too_long(path, source)]


def test_no_modules_import_in_a_circle() -> None:
    found = set(circle({name: source for name, (_, source) in read().items()}))
    assert not found, "these import each other in a circle"


def test_a_crowded_folder_is_found_and_a_catalogue_may_grow() -> None:
    many = [f"{folder}/m{number}.py" for folder in ("a/b", "engines/ops") for number in range(13)]
    assert crowded([*many, "a/b/__init__.py", "a/c.py"]) == ["a/b: 13 modules"]


@pytest.mark.parametrize("source, faults", [
    ("x = 1\n" * 401, ["m.py: 401 lines"]),
    ("from a import (\n    b,\n)\n" + "x = 1\n" * 399, []),
    ("class C:\n    def f(self):\n" + "        x = 1\n" * 50, ["m.py: f has 51 lines"]),
    ("def f():\n" + "    x = 1\n" * 49 + "\n" * 350, [])])
def test_what_is_too_long_is_found(source: str, faults: list[str]) -> None:
    assert list(too_long("m.py", source)) == faults


def test_a_circle_is_found_and_a_deferred_import_makes_none() -> None:
    assert circle({"a": "import b", "b": "from c import x", "c": "import a"})
    assert not circle({"a": "import b", "b": "from c import x", "c": "def f():\n    import a"})
