"""Engines and builds in a notebook: summaries that fit a screen, and a run on an array alone."""
from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import onnx
import pytest

from infer_server import build_engine
from infer_server.engines.errors import InputError
from tests.engines.compiler import program_models
from tests.engines.compiler.small_models import node, small_model

X = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
MODELS = {
    "fixed": small_model([node("Relu", "x", "y")], {"x": ("N", 4)}, ["y"]),
    "open": small_model([node("Relu", "x", "y")], {"x": ("N", "L")}, ["y"]),
    "program": program_models.chosen_rows()}
LINES, WIDTH = 24, 100          # of a screen


def built(model: onnx.ModelProto, **options: Any) -> Any:
    return build_engine(model, timing=False, cache=False, **options)


def named(name: str) -> Any:
    inputs = {f"a_rather_long_name_of_an_input_<{number}>_{'x' * 90}": ("N", 4) for number in range(40)}
    return built(small_model([node("Sum", " ".join(inputs), "y")], inputs, ["y"]) if name == "many" else MODELS[name])


class Table(HTMLParser):
    """Texts of the cells; every element that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        assert not self.opened

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


@pytest.mark.parametrize("name", [*MODELS, "many"])
def test_summaries_fit_a_screen_and_name_what_a_model_takes(name: str) -> None:
    build = named(name)
    for kind, shown in (("Build", build), ("Engine", build.engine(threads=2))):
        lines = repr(shown).splitlines()
        assert len(lines) <= LINES and max(map(len, lines)) <= WIDTH
        assert lines[0].startswith(f"<{kind} ") and lines[-1].endswith(">")
        cells = Table(shown._repr_html_()).cells
        assert {"inputs", "outputs", "steps", "memory"} <= set(cells) and cells[0] == lines[0][1:]
        assert name == "many" or all(cell in repr(shown) for cell in cells)
    assert len(repr(build.plan)) < 10_000


def test_a_summary_has_specialisations_and_notices() -> None:
    shown = repr(named("open"))
    assert "x float32 [batch, L]" in shown and "specialised  L=" in shown
    shown = repr(replace(named("fixed"), notices=tuple(f"notice {number}: {'word ' * 30}" for number in range(9))))
    assert "notice 5: word" in shown and "and 3 more" in shown and max(map(len, shown.splitlines())) <= WIDTH
    shown = " ".join(repr(built(MODELS["fixed"], target="numpy")).split())
    assert "0 of 1 steps compiled" in shown and "1 by reference" in shown


@pytest.mark.parametrize("name", ["fixed", "open"])
def test_an_array_alone_is_the_only_input(name: str) -> None:
    engine = named(name).engine()
    for x in (X, X[:1], X, X + 1):
        np.testing.assert_array_equal(engine.run(x)["y"], np.maximum(x, 0))
    with pytest.raises(InputError, match="input 'x' is float64, the model takes float32"):
        engine.run(X.tolist())


def test_an_array_alone_is_the_only_input_of_a_program() -> None:
    engine = named("program").engine()
    x = np.random.default_rng(0).standard_normal((9, 6)).astype(np.float32)
    for output, value in engine.run({"x": x}).items():
        np.testing.assert_array_equal(engine.run(x)[output], value)


def test_an_array_alone_is_the_only_input_without_a_default() -> None:
    model = small_model([node("Mul", "x scale", "y")], {"x": ("N", 4), "scale": ("N", 4)}, ["y"],
                        {"scale": np.float32([[1, 2, 3, 4]])})
    np.testing.assert_array_equal(built(model, optional=("scale",)).engine().run(X)["y"], X * [[1, 2, 3, 4]])


def test_an_array_alone_is_refused_by_a_model_of_several_inputs() -> None:
    model = small_model([node("Add", "a b", "y")], {"a": ("N", 4), "b": ("N", 4)}, ["y"])
    with pytest.raises(InputError, match="takes 2 inputs, 'a', 'b'; run it on {name: array} instead of a ndarray"):
        built(model).engine().run(X)
