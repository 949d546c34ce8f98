"""JSON is read into the annotated types, or refused with the path of the wrong value."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from infer_server.engines.plan.records import FieldError, from_plain, read_record


@dataclass(frozen=True)
class Part:
    number: int
    share: float = 0.5


@dataclass(frozen=True)
class Whole:
    name: str
    parts: tuple[Part, ...]
    place: tuple[int, str]
    on: bool = False
    either: Part | str | None = None
    named: Mapping[str, Part | None] | None = None
    anything: Mapping[str, Any] | None = None


GOOD: dict[str, Any] = {"name": "a", "parts": [{"number": 1}, {"number": -(1 << 63), "share": 2}], "place": [3, "b"],
                        "on": True, "either": {"number": 4}, "named": {"x": None, "y": {"number": 5}},
                        "anything": {"z": [1, "two", None]}}


def test_what_fits_is_read_as_its_types() -> None:
    assert read_record(Whole, GOOD) == Whole("a", (Part(1), Part(-(1 << 63), 2)), (3, "b"), True, Part(4),
                                             {"x": None, "y": Part(5)}, {"z": [1, "two", None]})
    assert from_plain(Whole, {"either": "text"}) == {"either": "text"}


@pytest.mark.parametrize(("change", "message"), [
    ({"name": 1}, "^name: 1 is no str$"),
    ({"parts": [{"number": 1}, {"number": "2"}]}, r"^parts\[1\].number: '2' is no int$"),
    ({"parts": [{"number": True}]}, r"^parts\[0\].number: True is no int$"),
    ({"parts": [{"number": 1.0}]}, r"1.0 is no int$"),
    ({"parts": [{"number": 1 << 63}]}, "a number of more than 64 bits is no int$"),
    ({"parts": [{"number": 1, "share": None}]}, r"^parts\[0\].share: None is no float$"),
    ({"parts": [{"share": 1.0}]}, r"^parts\[0\]: a Part without 'number'$"),
    ({"parts": [{"number": 1, "colour": "red"}]}, r"^parts\[0\]: a Part has no field 'colour'$"),
    ({"parts": {"number": 1}}, "^parts: {'number': 1} is no "),
    ({"place": [3]}, r"^place: \[3\] has not 2 members$"),
    ({"on": 1}, "^on: 1 is no bool$"),
    ({"either": 3}, "^either: 3 is no "),
    ({"named": {"x": {"number": "1"}}}, r"^named\['x'\].number: '1' is no int$"),
    ({"anything": [1]}, r"^anything: \[1\] is no "),
])
def test_what_does_not_fit_is_named_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        read_record(Whole, GOOD | change)


@dataclass(frozen=True)
class Kept:
    number: int
    apart: Literal["never in JSON"] = "never in JSON"


def test_an_annotation_whose_origin_is_no_class_disturbs_no_other_field() -> None:
    """NumPy 2.5 defines NDArray by a `type` statement where Python is 3.12 or newer."""
    assert read_record(Kept, {"number": 1}) == Kept(1)
    with pytest.raises(FieldError, match="^apart: 'text' is no "):
        read_record(Kept, {"number": 1, "apart": "text"})
