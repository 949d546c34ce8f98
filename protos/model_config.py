"""Messages of a model's configuration."""
from infer_server.protos._pool import definitions

globals().update(definitions("model_config.proto"))
