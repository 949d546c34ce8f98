"""The commands and Python blocks of guides and examples run, and their configurations are served."""
from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import pytest

import infer_server.calibration.run as calibration_run
from infer_server import server
from infer_server.config.fields import Verdict, findings
from infer_server.config.pbtxt import read_config
from tests.docs.pages import ROOT, Block, blocks, reader, steps
from tests.infer_server.brief_peaks import measure_briefly

DOCS = ROOT / "docs"
# The blocks of clients.md need a server: test_clients_page.py runs them.
GUIDES = [DOCS / "quickstart.md", *sorted({*(DOCS / "howto").glob("*.md")} - {DOCS / "howto" / "clients.md"})]
EXAMPLES = sorted((ROOT / "examples").glob("*/README.md"))
CONFIGURED = sorted(page for page in DOCS.rglob("*.md") if "```pbtxt" in page.read_text())
DEMO = ROOT / "scripts" / "demo_data"
EACH = 16           # one of so many calibration images is used
# Options by command, behind those of a page; tests/demo builds as users do.
FURTHER = {"build-engine": "--no-timing", "load-test": "--duration 0.3 --warmup 0.1", "run-engine": "--seconds 0.1",
           "plan-capacity": "--requests 2000"}


def link_data(folder: Path) -> None:
    """Link the demo's files into a folder. They stay the same files, so that pages share what is built of them."""
    for path in DEMO.iterdir():
        if path.name == "calibration":
            (folder / path.name).mkdir()
            for image in sorted(path.iterdir())[::EACH]:
                (folder / path.name / image.name).symlink_to(image)
        else:
            (folder / path.name).symlink_to(path)


def run(page: Path, folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a page's blocks. All pages share one engine cache, so that common models are built once."""
    if any("curl " in block.code for block in blocks(page)) and not shutil.which("curl"):
        pytest.skip("curl is not installed")
    if any("tritonclient" in block.code for block in blocks(page)):
        pytest.importorskip("tritonclient.grpc")
    if any("pyarrow" in block.code for block in blocks(page)):
        pytest.importorskip("pyarrow")
    cache = base / "caches"
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with reader(page, folder, cache, FURTHER) as notebook:
        for block in blocks(page):
            if block.language in ("bash", "python") and not block.reason:
                notebook.run(block)


@pytest.fixture(autouse=True)
def in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try few ranges of single tensors, measure the machine's peaks briefly, and stop servers without a grace.

    The search for ranges takes most of a build; tests/demo tries as many as users do.
    """
    monkeypatch.setattr(server, "ServerOptions", partial(server.ServerOptions, drain_grace_secs=0.0))
    monkeypatch.setattr(calibration_run, "MOST_TRIALS", 2)
    measure_briefly(monkeypatch)


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of a run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if own.name.startswith("popen-") else own


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_blocks_of_a_guide_run_in_order(page: Path, tmp_path: Path, base: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    link_data(folder)
    for path in (ROOT / "examples" / "detector").glob("*.py"):
        (folder / path.name).symlink_to(path)
    run(page, folder, base, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.parent.name)
def test_an_example_builds_serves_and_answers(page: Path, tmp_path: Path, base: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "examples" / page.parent.name
    shutil.copytree(page.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "scripts" / "demo_data").mkdir(parents=True)
    link_data(tmp_path / "scripts" / "demo_data")
    run(page, folder, base, monkeypatch)


def test_a_block_that_is_not_run_says_why() -> None:
    kept = [(page.stem, block.reason) for page in (*GUIDES, *EXAMPLES) for block in blocks(page) if block.reason]
    assert all(len(reason) > 5 for _, reason in kept)
    here = [reason for _, reason in kept if not reason.startswith("needs")]     # others need a cluster, a bucket, ...
    assert len(here) <= 24, "the guides are there to be run"


@pytest.mark.parametrize("page", CONFIGURED, ids=lambda page: page.stem)
def test_a_configuration_in_the_documents_is_served(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "pbtxt":
            (tmp_path / "config.pbtxt").write_text(block.code)
            message = read_config(tmp_path / "config.pbtxt")
            assert not [actual for actual in findings(message) if actual.treatment.verdict is Verdict.REFUSED]


def test_a_file_that_a_guide_shows_is_that_of_the_example() -> None:
    shown = 0
    for page in GUIDES:
        for block in blocks(page):
            if name := re.match(r"# (\w+\.py)\n", block.code):
                assert block.code == (ROOT / "examples" / "detector" / name[1]).read_text()
                shown += 1
    assert shown


def test_the_options_of_build_engine_are_in_its_guide() -> None:
    from dataclasses import fields

    from infer_server.engines.compiler.builder import BuildConfig
    page = (DOCS / "howto" / "python.md").read_text()
    assert not [field.name for field in fields(BuildConfig) if f"`{field.name}`" not in page]


def test_blocks_are_found_with_their_reasons_and_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- not run: slow -->\n```bash\nsleep 9\n```\n\n```python\nx = 1\n```\n")
    assert blocks(page) == [Block("bash", "sleep 9\n", 3, "slow"), Block("python", "x = 1\n", 7, "")]


def test_only_lines_that_need_no_shell_are_called_in_this_process() -> None:
    assert steps("mkdir x\ncp a x\nscore x \\\n  -o y --layer 'block*'    # all\nscore x > y\nrun-engine x\n") == [
        "mkdir x\ncp a x", ["score", "x", "-o", "y", "--layer", "block*"], "score x > y", ["run-engine", "x"]]
    for code in ("for x in y; do\nscore x\ndone\n", "cat > x <<END\nscore x\nEND\n", "infer-server --check x\n"):
        assert not [step for step in steps(code) if isinstance(step, list)]


@pytest.mark.parametrize("command", ["false", "inspect-engine gone.plan", "inspect-engine --gone"])
def test_a_block_that_fails_names_its_page_and_line(command: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n```bash\n{command}\n```\n")
    with reader(page, tmp_path, tmp_path, {}) as notebook, pytest.raises(AssertionError, match=r"page\.md:4"):
        notebook.run(blocks(page)[0])
