"""Access log: a line for each inference with time, client, model, items, status and duration."""
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
class AccessEntry:
    """Inference that has not ended yet."""
    client: str
    protocol: str
    id: str
    model: str
    version: str                        # requested version; "" for any
    received_ns: int
    batch: int = 0                      # items; 0 if the request is not valid
    responses: int = 0


class AccessLog:
    """Writer of access log lines."""
    def __init__(self, form: str, write: Callable[[str], None] = log.info) -> None:
        """Write lines in a form of FORMS with the function `write`."""
        self._form, self._write = form, write
        log.setLevel(logging.INFO)

    def end(self, entry: AccessEntry, status: str) -> None:
        """Write the line of an inference; `status` is OK, CANCELED, or the class name of its error."""
        fields = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "client": entry.client,
            "protocol": entry.protocol, "id": entry.id, "model": entry.model, "version": entry.version,
            "batch": entry.batch, "status": status, "responses": entry.responses,
            "us": (time.monotonic_ns() - entry.received_ns) // 1000}
        # Names and ids come from clients: JSON escapes line breaks in them.
        self._write(json.dumps(fields) if self._form == "json" else " ".join(
            f"{name}={json.dumps(value) if name in ('id', 'model', 'version') else value}"
            for name, value in fields.items()))
