"""Messages of a model's configuration."""
from protos._pool import definitions

globals().update(definitions("model_config.proto"))
