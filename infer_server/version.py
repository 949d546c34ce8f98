"""The server's name and version, as ServerMetadata and the HTTP pages give them; what tells its code from another."""
import hashlib
from importlib import metadata
from pathlib import Path

NAME = "infer-server"

try:
    VERSION = metadata.version(NAME)
except metadata.PackageNotFoundError:       # run from a checkout that is not installed
    VERSION = "0+checkout"


def code_on_disk() -> bytes:
    """A digest of the server's modules as a process that starts now would import them. (The version says less: not
    every checkout has another.)"""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()
