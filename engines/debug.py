"""Debug output selected by INFER_DEBUG, a comma-separated list.

    passes       the graph after each pass that changed it
    traceback    the traceback of an error, before its message
"""
from __future__ import annotations

import os


def debugging(what: str) -> bool:
    return what in os.environ.get("INFER_DEBUG", "").split(",")
