"""Regenerates protos/descriptors.binpb and protos/*.pyi from protos/*.proto. Needs grpcio-tools.

    python scripts/generate_protos.py
"""
from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"


def main() -> int:
    sources = sorted(path.name for path in PROTOS.glob("*.proto"))
    with tempfile.TemporaryDirectory() as stubs:
        status = protoc.main([
            "protoc", f"--proto_path={PROTOS}", f"--pyi_out={stubs}", "--include_imports",
            f"--descriptor_set_out={PROTOS / 'descriptors.binpb'}", *sources])
        if status:
            return int(status)
        for source in sources:
            stem = source.removesuffix(".proto")
            stub = (Path(stubs) / f"{stem}_pb2.pyi").read_text()
            # protoc writes stubs for top-level modules named *_pb2; here they are modules of a package.
            replacement = r"from infer_server.protos import \1 as \2"
            stub = re.sub(r"^import (\w+)_pb2 as (\w+)$", replacement, stub, flags=re.MULTILINE)
            # Completes protoc's stubs for strict type checking: types of messages passed as dicts, and of `global`.
            imports, body = stub.split("DESCRIPTOR", 1)
            body = re.sub(r"\b_Mapping\b(?!\[)", "_Mapping[str, object]", body)
            body = body.replace("**kwargs)", "**kwargs: object)")
            stub = f"{imports}DESCRIPTOR{body}"
            (PROTOS / f"{stem}.pyi").write_text(stub)
    return 0


if __name__ == "__main__":
    sys.exit(main())
