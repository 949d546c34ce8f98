"""Errors sent to clients contain no directories of the server."""
from __future__ import annotations

import pytest

from infer_server.errors import ExecutionError, InvalidRequestError
from infer_server.protocol import redaction
from infer_server.protocol.redaction import public_text, redacted


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_folders", [])
    monkeypatch.setattr(redaction, "_tops", set(redaction._TOP))
    redaction.register(["/srv/models", "/models"])


@pytest.mark.parametrize(("text", "told"), [
    ("/srv/models/m/1/model.onnx: no such file", "m/1/model.onnx: no such file"),
    ("/models/m/config.pbtxt:3: no field", "m/config.pbtxt:3: no field"),
    ("model repository /srv/models: Permission denied", "model repository models: Permission denied"),
    ("there is no folder x in /srv/models, /models", "there is no folder x in models, models"),
    ("'/srv/models/a b/1' has no version", "'a b/1' has no version"),
    ("building failed: /tmp/infer-x/m.plan: disk full", "building failed: .../m.plan: disk full"),
    ("(/usr/lib/libx.so.1)", "(.../libx.so.1)"),
    ("/srv/models2/x", ".../x"),
    ('  File "/srv/models/m/1/model.py", line 7, in execute', '  File "m/1/model.py", line 7, in execute'),
    ("[Errno 2] No such file or directory: '/nowhere/a secret/token'", "[Errno 2] No such file or directory: "
                                                                       "'.../token'"),
    ("[Errno 18] Invalid cross-device link: '/nowhere/a' -> '/etc/b'", "[Errno 18] Invalid cross-device link: '.../a' "
                                                                       "-> '.../b'")])
def test_a_path_becomes_relative_or_its_last_component(text: str, told: str) -> None:
    assert redacted(text) == told


@pytest.mark.parametrize("text", [
    "node '/model.0/conv/Conv' has no kernel", "tensor /encoder/layers.0/Add_output_0", "there is no /v2/nothing",
    "key '/region'", "s3://bucket/models/m: 404", "https://host/usr/x", "1/2", "a/b/c", "m/1/model.onnx", ""])
def test_what_only_looks_like_a_path_stays(text: str) -> None:
    assert redacted(text) == text


def test_what_a_client_sent_does_not_tell_it_which_folders_there_are() -> None:
    text = "expected a model, got '/srv/models/m'"
    assert public_text(InvalidRequestError(text)) == text
    assert public_text(ExecutionError("/srv/models/m: failed")) == "m: failed"
