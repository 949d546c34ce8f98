"""Messages of gRPC's health check."""
from infer_server.protos._pool import definitions

globals().update(definitions("health.proto"))
