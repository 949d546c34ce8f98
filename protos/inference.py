"""Messages of the Open Inference protocol with Triton's extensions."""
from infer_server.protos._pool import definitions

globals().update(definitions("inference.proto"))
