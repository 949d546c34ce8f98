"""Tests of plans that machines share, on a folder and on fsspec's memory."""
from __future__ import annotations

import hashlib
import logging
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer_server.engines.errors import ConfigError
from infer_server.engines.machine import plan_store
from infer_server.engines.machine.plan_store import PlanStore, read_secret

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
K, OTHER = "0" * 40, "1" * 40
SECRET, CONTENT, MOST = b"a secret of some length", bytes(range(256)) * 40, 1 << 20


@pytest.fixture(autouse=True)
def empty_memory(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, plan_store.__name__)
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield
    files.store.clear()


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    file = tmp_path / "built.plan"
    file.write_bytes(CONTENT)
    return file


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared" / "plans"


def fetched(store: PlanStore, tmp_path: Path, key: str = K, most: int = MOST) -> bytes | None:
    to = tmp_path / "cache" / f"{key}.plan"
    to.parent.mkdir(exist_ok=True)
    found = store.fetch(key, to, most)
    assert found == to.exists() and [path.name for path in to.parent.iterdir()] == [to.name] * found
    return to.read_bytes() if found else None


@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("where", ["folder", "memory://plans"])
def test_a_plan_that_one_machine_stores_another_one_reads(
        plan: Path, shared: Path, tmp_path: Path, where: str, secret: bytes, caplog: pytest.LogCaptureFixture) -> None:
    url = str(shared) if where == "folder" else where
    assert fetched(PlanStore(url, secret), tmp_path) is None and "miss: there is no plan" in caplog.text
    PlanStore(url, secret).store(K, plan)
    assert fetched(PlanStore(url, secret), tmp_path) == CONTENT
    assert f"hit: plan {K}" in caplog.text and "refused" not in caplog.text
    plan.write_bytes(b"another")                # of the same key: the last one wins
    PlanStore(url, secret).store(K, plan)
    assert fetched(PlanStore(url, secret), tmp_path) == b"another"


def test_the_digest_is_as_sha256sum_reads_it_and_no_temporary_file_is_left(plan: Path, shared: Path) -> None:
    PlanStore(str(shared), SECRET).store(K, plan)
    assert sorted(path.name for path in shared.iterdir()) == [f"{K}.plan", f"{K}.sha256"]
    assert (shared / f"{K}.sha256").read_text().startswith(hashlib.sha256(CONTENT).hexdigest())
    subprocess.run(["sha256sum", "--check", "--quiet", f"{K}.sha256"], cwd=shared, check=True)


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], "does not have the SHA-256"),
    (lambda data: data[:len(data) // 2], "5120 bytes, and 10240 were stored"), (lambda data: b"", "0 bytes")])
def test_a_flipped_bit_and_half_a_plan_are_refused(
        plan: Path, shared: Path, tmp_path: Path, damage: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    store = PlanStore(str(shared))
    store.store(K, plan)
    (shared / f"{K}.plan").write_bytes(damage(CONTENT))
    assert fetched(store, tmp_path) is None
    assert f"refused: plan {K}" in caplog.text and reason in caplog.text
    store.store(K, plan)                        # what was built in its place
    assert fetched(store, tmp_path) == CONTENT


@pytest.mark.parametrize("about", ["", "x", "0" * 64 + f"  {OTHER}.plan\n# bytes 1\n", "0" * 5000])
def test_a_damaged_digest_is_refused(
        plan: Path, shared: Path, tmp_path: Path, about: str, caplog: pytest.LogCaptureFixture) -> None:
    PlanStore(str(shared)).store(K, plan)
    (shared / f"{K}.sha256").write_text(about)
    assert fetched(PlanStore(str(shared)), tmp_path) is None and f"has a damaged {K}.sha256" in caplog.text


@pytest.mark.parametrize(("signed", "reason"), [(b"", "is not signed"), (b"another secret, as long", "another key")])
def test_a_plan_that_was_not_signed_with_the_key_is_refused(
        plan: Path, shared: Path, tmp_path: Path, signed: bytes, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    PlanStore(str(shared), signed).store(K, plan)
    assert fetched(PlanStore(str(shared), SECRET), tmp_path) is None and reason in caplog.text
    assert fetched(PlanStore(str(shared)), tmp_path) == CONTENT, "without a key there is trust"


def test_a_signed_plan_cannot_stand_for_another_one(
        plan: Path, shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = PlanStore(str(shared), SECRET)
    store.store(K, plan)
    (shared / f"{K}.plan").rename(shared / f"{OTHER}.plan")
    text = (shared / f"{K}.sha256").read_text()
    (shared / f"{OTHER}.sha256").write_text(text)
    assert fetched(store, tmp_path, OTHER) is None and "damaged" in caplog.text
    (shared / f"{OTHER}.sha256").write_text(text.replace(K, OTHER))
    assert fetched(store, tmp_path, OTHER) is None and "signed with another key" in caplog.text


def test_a_plan_that_is_too_large_is_not_read(
        plan: Path, shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PlanStore(str(shared)).store(K, plan)
    assert fetched(PlanStore(str(shared)), tmp_path, most=len(CONTENT) - 1) is None and "more than" in caplog.text


def test_a_large_plan_is_read_in_blocks(
        plan: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_store, "_BLOCK", 999)
    PlanStore(str(shared)).store(K, plan)
    assert fetched(PlanStore(str(shared)), tmp_path) == CONTENT


def test_a_plan_that_is_replaced_while_it_is_read_is_used(
        plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PlanStore("memory://plans")
    store.store(K, plan)
    cat_file = type(store._files).cat_file

    def meanwhile(files: Any, path: str, **named: Any) -> bytes:
        if path.endswith(".plan"):
            monkeypatch.setattr(type(store._files), "cat_file", cat_file)
            PlanStore("memory://plans").store(K, plan)
        data: bytes = cat_file(files, path, **named)
        return data

    plan.write_bytes(CONTENT[::-1])
    monkeypatch.setattr(type(store._files), "cat_file", meanwhile)
    assert fetched(store, tmp_path) == CONTENT[::-1]


def test_a_store_that_is_away_costs_one_wait_and_stops_nothing(
        plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store, ends, calls = PlanStore("memory://plans"), threading.Event(), list[str]()

    def hangs(files: Any, path: str, **named: Any) -> bytes:
        calls.append(path)
        ends.wait()
        return b""

    monkeypatch.setattr(plan_store, "_CALL_SECS", 0.05)
    monkeypatch.setattr(type(store._files), "cat_file", hangs)
    assert fetched(store, tmp_path) is None and fetched(store, tmp_path, OTHER) is None
    store.store(K, plan)
    ends.set()
    assert len(calls) == 1 and not store._files.store
    assert caplog.text.count("unreachable: TimeoutError: no response within") == 1


def test_a_store_that_cannot_be_written_is_said_and_stops_nothing(
        plan: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    PlanStore(str(tmp_path / "file")).store(K, plan)
    assert f"plan {K} is not stored" in caplog.text


def test_options_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere://x: Protocol not known"):
        PlanStore("nowhere://user:word@x")
    (tmp_path / "key").write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="16 to 4096 bytes; make one with: openssl rand -hex 32"):
        read_secret(tmp_path / "key")
    with pytest.raises(ConfigError, match="5 bytes, fewer than 16"):
        PlanStore("memory://plans", b"short")
    (tmp_path / "key").write_bytes(SECRET + b"\n")
    assert read_secret(tmp_path / "key") == SECRET
