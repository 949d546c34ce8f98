"""What inference needs of the server, over whatever protocol."""
from __future__ import annotations

from dataclasses import dataclass

from infer_server.endpoints.inflight import Inflight
from infer_server.endpoints.shared_memory import Regions
from infer_server.repository.on_demand import OnDemand
from infer_server.serving import Inferences


@dataclass(frozen=True)
class Front:
    inferences: Inferences
    inflight: Inflight
    regions: Regions
    on_demand: OnDemand | None          # None: models are loaded before they are asked for
    max_message_bytes: int = 256 << 20  # of a message over gRPC, also when it is decompressed
    max_json_bytes: int = 64 << 20      # of the JSON of a request
