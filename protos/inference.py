"""Messages of the Open Inference protocol with Triton's extensions."""
from protos._pool import definitions

globals().update(definitions("inference.proto"))
