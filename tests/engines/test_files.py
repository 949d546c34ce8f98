"""atomic_write leaves either the old file or the complete new one, and no other files."""
import resource
from pathlib import Path

import pytest

from infer_server.engines.files import atomic_write


def test_the_new_content_replaces_the_old(tmp_path: Path) -> None:
    path = tmp_path / "m.plan"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old", "until the block ends"
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.plan"]


def test_a_block_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "m.plan"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.plan"]


def test_a_disk_that_is_full_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "m.plan"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))      # to a process, a disk with so many bytes left
    try:
        with pytest.raises(OSError), atomic_write(path) as file:
            file.write(bytes(1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.plan"]


def test_a_folder_that_is_missing_is_named_by_the_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"), atomic_write(tmp_path / "missing" / "m.plan"):
        pass


def test_a_relative_name_is_written_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with atomic_write("m.plan") as file:
        file.write(b"new")
    assert (tmp_path / "m.plan").read_bytes() == b"new"
