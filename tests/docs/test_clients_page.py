"""The blocks of docs/howto/clients.md run against a server, one after the other."""
from __future__ import annotations

from pathlib import Path

import pytest

from infer_server.clients import errors
from infer_server.clients.channels.options import ChannelOptions
from scripts.testing.numpy_engine import write_model
from tests.docs.pages import blocks
from tests.infer_server.serving import serving

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "clients.md"


def test_the_blocks_of_the_page_run_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, "resnet50", shape=[3, 224, 224])
    names: dict[str, object] = {"__name__": "notebook"}
    actual = [block for block in blocks(PAGE) if block.language == "python"]
    assert len(actual) == 7
    with serving(tmp_path) as server:
        renamed = {":8001": f":{server.ports.grpc}", '"input"': '"x"', '"output"': '"y"'}     # as the test's model has
        for block in actual:
            code = block.code
            for old, new in renamed.items():
                code = code.replace(old, new)
            exec(compile("\n" * block.line + code, str(PAGE), "exec"), names)
    assert "resnet51" in capsys.readouterr().out and len(names["answers"]) == 16        # type: ignore[arg-type]
    for name in ("client", "careful", "encrypted", "patient", "spread", "pods", "replicas"):
        names[name].close()                                                             # type: ignore[attr-defined]


def test_every_option_and_error_is_on_the_page() -> None:
    page = PAGE.read_text()
    fields = set(ChannelOptions.__dataclass_fields__) - {"connect_secs"}
    assert not [name for name in fields if name not in page]
    kinds = [name for name, kind in vars(errors).items() if isinstance(kind, type)]
    assert len(kinds) == 8 and not [name for name in kinds if f"`{name}`" not in page]
