"""A line for each inference: when, by whom, which model, how many items, how it ended, how long it took."""
from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

log = logging.getLogger("infer_server.access")

FORMS = ("text", "json")
OK = "OK"
CANCELED = "CANCELED"


@dataclass(slots=True)
class Entry:
    """An inference that has not ended yet."""
    client: str
    protocol: str
    id: str
    model: str
    version: str                        # as asked for; "": any
    received_ns: int
    batch: int = 0                      # items; 0: it fits no model
    responses: int = 0


class AccessLog:
    def __init__(self, form: str, write: Callable[[str], None] = log.info) -> None:
        """form: of FORMS."""
        self._form, self._write = form, write
        log.setLevel(logging.INFO)

    def end(self, entry: Entry, status: str) -> None:
        """status: OK, CANCELED, or the class of the error that it ended with."""
        fields = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "client": entry.client,
            "protocol": entry.protocol, "id": entry.id, "model": entry.model, "version": entry.version,
            "batch": entry.batch, "status": status, "responses": entry.responses,
            "us": (time.monotonic_ns() - entry.received_ns) // 1000}
        # Names and ids are clients' own text: as JSON has them, no line ends within one.
        self._write(json.dumps(fields) if self._form == "json" else " ".join(
            f"{name}={json.dumps(value) if name in ('id', 'model', 'version') else value}"
            for name, value in fields.items()))
