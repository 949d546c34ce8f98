"""Generated pages agree with the source, links of all documents resolve, and pages keep their size limits."""
from __future__ import annotations

import ast
import asyncio
import json
import re
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from infer_server.config.fields import TREATMENTS
from infer_server.endpoints.metrics import Metrics
from infer_server.engines.ops import OPS
from tests.docs.pages import ROOT
from tests.test_hygiene import modules

DOCS = ROOT / "docs"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MAX_BYTES = {"README.md": 8192, "ARCHITECTURE.md": 14_336, "CHANGELOG.md": 6144}
MAX_BYTES_OF_A_PAGE = 14_336


def load() -> ModuleType:
    spec = spec_from_file_location("generate", DOCS / "generate.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load()
SOURCES = sorted(path for path in DOCS.rglob("*.md"))


@cache
def pages() -> dict[str, str]:
    found: dict[str, str] = generate.pages()
    return found


@pytest.mark.parametrize("command", generate.COMMANDS)
def test_every_option_of_a_command_is_on_its_page(command: str) -> None:
    page = pages()[f"reference/cli/{command}.md"]
    shown = [name for action in generate.parser_of(command)._actions if action.help != "==SUPPRESS=="
             for name in action.option_strings]
    assert len(shown) > 4 and not [name for name in shown if f"`{name}`" not in page]


def test_every_field_that_is_treated_is_on_the_page_of_fields() -> None:
    page = pages()["reference/config-fields.md"]
    assert not [path for path in TREATMENTS if f"| `{path}` | {TREATMENTS[path].verdict.value} |" not in page]
    assert "| `dynamic_batching.max_queue_delay_microseconds` | served |" in page


def test_every_operator_of_onnx_is_on_the_page_of_operators() -> None:
    import onnx
    page, names = pages()["reference/operators.md"], {schema.name for schema in onnx.defs.get_all_schemas_with_history()
                                                    if schema.domain == ""}
    assert not [name for name in names if f"`{name}`" not in page]
    assert "| `Conv` | kernel" in page and len(names & set(OPS)) > 100


def test_the_metrics_of_a_server_are_on_the_page_of_metrics() -> None:
    text = asyncio.run(Metrics().render([]))
    served = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    page = pages()["reference/metrics.md"]
    assert len(served) > 5 and not [name for name, kind in served if f"| `{name}` | {kind} |" not in page]
    literals = {name for path in ("endpoints/metrics.py", "endpoints/status/state.py", "observing/machine.py")
                for node in ast.walk(ast.parse((ROOT / "infer_server" / path).read_text()))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
                for name in re.findall(r"^(?:nv|infer_server|process)_\w*[a-z]$", node.value)}
    assert len(literals) > 20 and not [name for name in literals if f"`{name}`" not in page]


def test_the_routes_of_both_ports_are_on_the_page_of_routes() -> None:
    page = pages()["reference/routes.md"]
    for line in ("| `POST` | `/v2/models/MODEL[/versions/VERSION]/infer` | inference |", "| `GET` | `/v2` | metadata |",
                 "| `GET` | `/v2/{system\\|cuda}sharedmemory[/region/REGION]/status` | shared-memory |",
                 "| `GET` | `/v2/logging` | logging |", "| `ModelStreamInfer` | inference |"):
        assert line in page
    assert "(?P" not in page and "[^/]" not in page


def test_every_module_is_on_the_page_of_modules_with_a_sentence() -> None:
    page = pages()["internals/modules.md"]
    output = {f"{folder}/{name}" for folder, table in re.findall(r"^## (\S+)\n\n((?:\|.*\n)+)", page, re.MULTILINE)
              for name, text in re.findall(r"^\| `(\S+\.py)` \| (.*) \|$", table, re.MULTILINE) if len(text) > 9}
    there = {str(path.relative_to(ROOT)) for path in modules() if path.read_text().lstrip().startswith('"""')}
    assert output == there


@pytest.mark.parametrize("text, sentence", [
    ("One. Two.", "One."), ("One,\ntwo: three. Four", "One, two: three."), ("One\n\nTwo.", "One"),
    ("As i.e. this. Next", "As i.e. this."), ("y = x[0] + ... + x[i]. Then", "y = x[0] + ... + x[i].")])
def test_the_first_sentence_ends_at_its_full_stop(text: str, sentence: str) -> None:
    assert generate.first_sentence(text) == sentence


def test_every_case_of_the_results_has_a_line() -> None:
    page = pages()["benchmarks/every-case.md"]
    assert "| nanodet_g | int8 | 1 | 8 | ms of CPU time | 13.2 | our Q/DQ | 1.65 (1.64 to 1.69) | 15.6 | " in page
    files = [json.loads(path.read_text()) for path in (DOCS / "benchmarks" / "results").glob("*.json")]
    cases = page.count("| ms ")         # "| ms of CPU time |" on one thread, "| ms |" on several
    assert cases == sum(len(results["cases"]) for results in files) == 116


def test_what_markdown_would_read_is_escaped_outside_of_code() -> None:
    assert generate._escaped("a_b <c> `d_e[0]`\n*f* g[0]") == r"a\_b \<c> `d_e[0]` \*f\* g\[0]"


def test_links_of_a_root_document_hold_on_its_page() -> None:
    page = pages()["internals/architecture.md"]
    assert "](../concepts.md)" in page and "](shapes.md)" in page and "](docs/" not in page
    assert "](../contributing.md)" in page
    assert "](quickstart.md)" in pages()["index.md"] and 'src="benchmarks/eight-models.png"' in pages()["index.md"]
    assert "LICENSE (`LICENSE`)" in pages()["index.md"], "what is not on the site is named"


def dead_links(page: Path, text: str) -> list[str]:
    """Return the relative links of a page without an existing or generated target."""
    actual = []
    for link in LINK.findall(re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)):
        path = link.partition("#")[0]
        if "://" in link or not path:
            continue
        target = (page.parent / path).resolve()
        generated = target.is_relative_to(DOCS) and str(target.relative_to(DOCS)) in pages()
        if not target.exists() and not generated:
            actual.append(link)
    return actual


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *SOURCES, *(ROOT / "examples").rglob("*.md")],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_document_lead_somewhere(page: Path) -> None:
    assert not dead_links(page, page.read_text())


def test_a_dead_link_is_found_and_a_generated_page_is_none() -> None:
    text = "[a](gone.md#x) [b](reference/cli/load-test.md) [c](https://example.org) [d](#here) `[e](no.md)`"
    assert dead_links(DOCS / "page.md", text) == ["gone.md#x"]


def test_documents_are_short() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in MAX_BYTES}
    assert not {name: size for name, size in sizes.items() if size > MAX_BYTES[name]}
    assert not {str(page): page.stat().st_size for page in SOURCES
                if page.stat().st_size > MAX_BYTES_OF_A_PAGE and page.parent.name != "benchmarks"}
