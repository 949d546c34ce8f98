"""Constants that follow from numbers of tokens.

They are functions of a module of their own, because symbolic plans, which run without onnx, call them by name.
"""
from __future__ import annotations

import numpy as np


def causal_mask(tokens: int, window: int, dtype: np.dtype[np.generic]) -> np.ndarray:
    """Return the mask of a prompt: -inf for keys after a query, or `window` and more before it."""
    keys = np.arange(tokens)
    behind = keys[:, None] - keys
    seen = (behind >= 0) & ((behind < window) | (window < 0))
    return np.where(seen, 0, -np.inf).astype(dtype)[None, None]


def token_places(count: int, dtype: type[np.signedinteger]) -> np.ndarray:
    """Return the positions of tokens: 0, ..., count - 1."""
    return np.arange(count, dtype=dtype)


def row(count: int) -> np.ndarray:
    """Return the positions of tokens as int64 [1, count]."""
    return np.arange(count)[None]


def column(count: int) -> np.ndarray:
    """Return the positions of tokens as int32 [count, 1]."""
    return np.arange(count, dtype=np.int32)[:, None]


def last_places(count: int) -> np.ndarray:
    """Return the positions of the last tokens relative to the last one: 1 - count, ..., 0."""
    return np.arange(count) - count + 1
