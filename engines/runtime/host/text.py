"""ONNX Runtime's Tokenizer (com.microsoft), the first operator of text pipelines."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from infer_server.engines.errors import PlanError
from infer_server.engines.ir.graph import Array

Split = Callable[[str], list[str]]
_BEGIN, _END = "\x02", "\x03"       # the tokens that mark the ends of a text
# A single character class, optionally repeated: only for these is the match of `re` always the longest one.
_PLAIN = re.compile(r"(\[\^?[^\[\]]+\]|\\.|[^\\|()\[\]*?+{}^$])[*+]?")


def tokenizer(attrs: Mapping[str, Any]) -> Callable[[Array], tuple[Array]]:
    """Return a function that splits texts to tokens, padded to the longest row.

    Raises PlanError if the attributes define no tokens, or by an expression that Python's re does not support.
    """
    split, least = _splitter(attrs), attrs["mincharnum"]

    def tokens(text: str) -> list[str]:
        return [token for token in split(text) if len(token) >= least]

    def tokenize(x: Array) -> tuple[Array]:
        if x.ndim not in (1, 2):
            raise ValueError(f"a tensor of {x.ndim} axes; it takes texts or rows of texts")
        if not x.size:
            return (np.empty((*x.shape[:-1], 0), object),)
        rows = [tokens(text) for text in x.reshape(-1).tolist()]
        if attrs["mark"] and any(rows):
            rows = [[_BEGIN, *row, _END] for row in rows]
        made = np.full((len(rows), max(map(len, rows))), attrs["pad_value"], object)
        for place, row in zip(made, rows, strict=True):
            place[:len(row)] = row
        return (made.reshape(*x.shape, -1) if made.size else np.empty((*x.shape, 0), object),)
    return tokenize


def _splitter(attrs: Mapping[str, Any]) -> Split:
    separators, expression = attrs.get("separators") or (), attrs.get("tokenexp")
    if [*separators] == [""]:
        return list
    if separators:
        return partial(_between, [_matches(separator) for separator in separators])
    if not expression:
        raise PlanError("a Tokenizer has neither separators nor a tokenexp")
    matches = _matches(expression)
    return lambda text: [text[begin:end] for begin, end in matches(text)]


def _between(separators: list[Callable[[str], Iterator[tuple[int, int]]]], text: str) -> list[str]:
    """Split a text at the first separator, each part at the second, and so on; empty parts are dropped."""
    parts = [text]
    for matches in separators:
        parts = [piece for part in parts for piece in _apart(part, matches(part)) if piece]
    return parts


def _apart(text: str, spans: Iterator[tuple[int, int]]) -> Iterator[str]:
    done = 0
    for begin, end in spans:
        yield text[done:begin]
        done = end
    yield text[done:]


def _matches(expression: str) -> Callable[[str], Iterator[tuple[int, int]]]:
    """Return a function that yields the leftmost-longest matches of an expression, as RE2 does in ONNX Runtime."""
    try:
        pattern = re.compile(expression, re.ASCII)
    except re.error as error:
        raise PlanError(f"a Tokenizer's expression {expression!r} cannot be read: {error}") from error
    plain = bool(_PLAIN.fullmatch(expression))

    def find(text: str) -> Iterator[tuple[int, int]]:
        at = 0
        while at < len(text) and (found := pattern.search(text, at)):
            begin, end = found.span()
            if not plain:
                end = next(last for last in range(len(text), begin - 1, -1)
                           if last == end or pattern.fullmatch(text, begin, last))
            if end > begin:
                yield begin, end
            at = max(end, begin + 1)
    return find


# Given the attributes, they make what the operator of that name computes.
OPERATORS: Mapping[str, Callable[[Mapping[str, Any]], Callable[..., tuple[Any, ...]]]] = {"Tokenizer": tokenizer}
