"""The server's name and version, as ServerMetadata and the HTTP pages give them."""
from importlib import metadata

NAME = "infer-server"

try:
    VERSION = metadata.version(NAME)
except metadata.PackageNotFoundError:       # run from a checkout that is not installed
    VERSION = "0+checkout"
