"""INFER_DEBUG: what the compiler shows of itself, as a list with commas.

    passes       the graph after each pass that changed it
    traceback    where an error was raised, before the line that says what it is
"""
from __future__ import annotations

import os


def debugging(what: str) -> bool:
    return what in os.environ.get("INFER_DEBUG", "").split(",")
