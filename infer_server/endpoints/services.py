"""Server state that inference requests of every protocol share."""
from __future__ import annotations

from dataclasses import dataclass

from infer_server.endpoints.inflight import Inflight
from infer_server.endpoints.shared_memory import Regions
from infer_server.observing.load_report import LoadReports
from infer_server.repository.on_demand import OnDemand
from infer_server.serving import Inferences


@dataclass(frozen=True)
class InferenceServices:
    """Services that inference endpoints use, and the size limits of requests."""
    inferences: Inferences
    inflight: Inflight
    regions: Regions
    on_demand: OnDemand | None          # None: models are loaded before requests arrive
    max_message_bytes: int = 256 << 20  # maximum size of a gRPC message, compressed and decompressed
    max_json_bytes: int = 64 << 20      # maximum size of a request's JSON
    load: LoadReports | None = None     # None: clients get no load reports
