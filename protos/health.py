"""Messages of gRPC's health check."""
from protos._pool import definitions

globals().update(definitions("health.proto"))
