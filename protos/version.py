"""The name and the version of what is installed: protocol, clients, compiler and server are one distribution."""
from importlib import metadata

NAME = "infer-server"

try:
    VERSION = metadata.version(NAME)
except metadata.PackageNotFoundError:       # run from a checkout that is not installed
    VERSION = "0+checkout"
