"""Load report of a server (Open Request Cost Aggregation)."""
from infer_server.protos._pool import definitions

globals().update(definitions("orca.proto"))
