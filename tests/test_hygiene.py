"""Rules for the text of the repository: no local addresses, and docstrings that can be understood alone."""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.sources import facts

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engines", "calibration", "infer_server", "protos", "clients")

# A home or a workplace: somebody else's machine has none of it. Registries are the installer's configuration. KServe
# mounts models at mnt/models in every container.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:work|home|root|opt|mnt(?!/models\b)|Users)/\w")
REGISTRY = re.compile(r"\b(?:pypi\.org|pythonhosted\.org|registry\.npmjs|npmjs\.com|deb\.debian\.org|proxy\.golang|"
                      r"download\.pytorch\.org|index-url)")


def files() -> list[Path]:
    """Return the files that are tracked, or would be if they were added."""
    listing = subprocess.run(["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "-co", "--exclude-standard"],
                             cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def modules() -> list[Path]:
    """Return every handwritten module that is installed, except empty __init__.py files."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if path.stat().st_size]


def local_addresses(text: str) -> list[str]:
    return [found.group() for pattern in (MACHINE_PATH, REGISTRY) for found in pattern.finditer(text)]


def test_no_file_holds_an_address_of_one_machine_or_registry() -> None:
    found = {}
    for path in files():
        if path == Path(__file__):
            continue                    # it has to spell what it looks for
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue                    # an image or a model
        if addresses := local_addresses(text):
            found[str(path.relative_to(ROOT))] = addresses
    assert not found


@pytest.mark.parametrize("text", ["see /home/me/model.onnx", 'open("/work/x")', "pip --index-url x", "https://pypi.org/x"])
def test_a_local_address_is_caught(text: str) -> None:
    assert local_addresses(text)


@pytest.mark.parametrize("text", ["engines/work/x", "/path/to/model", "http://localhost:8000/v2/models", "~/work/x"])
def test_other_paths_are_not_taken_for_local_addresses(text: str) -> None:
    assert not local_addresses(text)


def test_every_module_says_what_it_holds() -> None:
    silent = [str(path.relative_to(ROOT)) for path in modules()
              if not path.name.startswith("_") and (facts(path.read_text()).docstrings or [(0, "")])[0][0] != 1]
    assert not silent


# Openings that need the line above a docstring to be understood.
SUBJECTLESS = re.compile(r"(Of|The same|What|Where|Its|Those|Whether|That|Likewise|Also|Nor|As|How|By|Which|Who|And|"
                         r"From|Behind|Beside|Over|Not|Nobody)\b")


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    paths = [path for path in files() if path.suffix == ".py"]
    assert not [f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}" for path in paths
                for line, text in facts(path.read_text()).docstrings if SUBJECTLESS.match(text)]


@pytest.mark.parametrize("text", ["Of each item.", "Whether it fits.", "What a person reads.", "As Engine.run."])
def test_a_docstring_without_a_subject_is_noticed(text: str) -> None:
    assert SUBJECTLESS.match(text) and not SUBJECTLESS.match(f"Return it. {text}") and not SUBJECTLESS.match("Assert")
