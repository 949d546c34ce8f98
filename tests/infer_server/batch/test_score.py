"""score: folders in, Parquet out; a killed run is continued, each item once; items that cannot be scored."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from infer_server import Scorer
from infer_server.batch import cli
from infer_server.engines.ir.graph import Array
from tests.infer_server.batch.models import CLASSES, TEXT, pictures, plan_of

COUNT = 60


def score(*arguments: object) -> int:
    """Run the command in this process, with one process unless the arguments say otherwise."""
    return cli.main([*map(str, arguments), *([] if "--processes" in arguments else ["--processes", "1"])])


def scores_of(plan: Path, images: Array) -> Array:
    scores: Array = Scorer(plan)({"image": images})["scores"]
    return scores


def column(folder: Path, name: str) -> Any:
    """Return a column of all files of results, in the order of their names."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("part-*"))])[name].to_pylist()


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("part-*")}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a Parquet file of COUNT rows in row groups of 20."""
    path = tmp_path / "rows.parquet"
    images = pa.FixedSizeListArray.from_arrays(pa.array(pictures(COUNT).reshape(-1)), 16)
    pq.write_table(pa.table({"id": np.arange(COUNT), "image": images}), path, row_group_size=20)
    return path


def test_a_parquet_file_is_scored_in_splits(plan: Path, table: Path, tmp_path: Path, capsys: Any) -> None:
    assert score(plan, table, "-o", tmp_path / "out", "--split-items", 8, "--json") == 0
    actual = json.loads(capsys.readouterr().out)
    assert (actual["items"], actual["skipped"], actual["files"], actual["failed"]) == (COUNT, 0, 9, {})
    assert actual["items_per_second"] > 0 and 0 < actual["engine_share"] < 1
    assert column(tmp_path / "out", "id") == list(range(COUNT))
    np.testing.assert_array_equal(np.array(column(tmp_path / "out", "scores"), np.float32),
                                  scores_of(plan, pictures(COUNT)))
    whole = pq.read_table(tmp_path / "out")        # the manifest is no data to readers of folders
    assert whole.num_rows == COUNT and (tmp_path / "out" / "_SUCCESS").exists()


@pytest.mark.parametrize("kind", ["npz", "compressed", "npy", "folder", "fortran"])
def test_arrays_are_read_in_pieces(plan: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_server.batch.sources.CHUNK_ITEMS", 4)
    images, path = pictures(COUNT), tmp_path / "in"
    path.mkdir()
    if kind == "npy":
        np.save(path / "a.npy", images.astype(np.float64))
    elif kind == "folder":
        (path / "inner").mkdir()
        np.savez(path / "a.npz", image=images[:30])
        np.savez(path / "inner" / "one.npz", image=images[30])      # one item, without the batch axis
        np.savez(path / "z.npz", image=images[31:])
    else:
        save = np.savez_compressed if kind == "compressed" else np.savez
        save(path / "a.npz", image=np.asfortranarray(images) if kind == "fortran" else images)
    assert score(plan, path, "-o", tmp_path / "out", "--split-items", 25) == 0
    np.testing.assert_array_equal(np.array(column(tmp_path / "out", "scores"), np.float32), scores_of(plan, images))
    names, items = column(tmp_path / "out", "path"), column(tmp_path / "out", "item")
    assert len({*zip(names, items, strict=True)}) == COUNT
    if kind == "folder":
        assert names[30] == "inner/one.npz" and items[30] == 0


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder of three pictures, one of which is broken."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (folder / "1.png").write_bytes(b"no picture")
    return folder


def test_a_broken_image_ends_the_run_or_is_left_out(plan: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    command = (plan, photos, "-o", tmp_path / "out", "--outputs", "scores=s", "--top-k", 1)
    assert score(*command) == 2
    output = capsys.readouterr()
    assert "1.png cannot be read as an image" in output.err and "--skip-bad leaves" in output.err
    assert "go through the 'gray' preset" in output.err and not parts(tmp_path / "out")
    assert score(*command, "--skip-bad", "-q") == 0
    output = capsys.readouterr()
    assert "3 items" in output.out and "1 failed" in output.out and "failed: 1.png: " in output.out and not output.err
    assert column(tmp_path / "out", "path") == ["0.png", "2.png"]
    assert score(*command, "--skip-bad", "--json") == 0     # counted again from the files that are there
    assert set(json.loads(capsys.readouterr().out)["failed"]) == {"1.png"}


def test_arrays_and_rows_that_do_not_fit_are_named(plan: Path, tmp_path: Path, capsys: Any) -> None:
    arrays, rows = tmp_path / "arrays", tmp_path / "rows.parquet"
    arrays.mkdir()
    np.savez(arrays / "a.npz", image=pictures(2))
    np.savez(arrays / "b.npz", image=np.zeros((2, 3), np.float32))
    pq.write_table(pa.table({"image": [[0.5] * 16, None, [0.5] * 16]}), rows)
    for path, name in ((arrays, "b.npz"), (rows, "rows.parquet, row 1")):
        assert score(plan, path, "-o", tmp_path / path.stem) == 2
        assert name in capsys.readouterr().err
        assert score(plan, path, "-o", tmp_path / path.stem, "--skip-bad", "--json") == 0
        assert set(json.loads(capsys.readouterr().out)["failed"]) == {name}


def test_a_killed_run_is_continued_and_gives_the_same_bytes(plan: Path, table: Path, tmp_path: Path,
                                                            capsys: Any) -> None:
    command = [plan, table, "-o", tmp_path / "out", "--split-items", 1, "--batch", 1]
    clean = tmp_path / "clean"
    assert score(plan, table, "-o", clean, "--split-items", 1, "--batch", 1) == 0
    process = subprocess.Popen([sys.executable, "-m", "infer_server", "score", *map(str, command), "--processes", "2"],
                               stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[3])
    while process.poll() is None and not parts(tmp_path / "out"):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (tmp_path / "out" / ".part-00001.parquet.1.abc").write_bytes(b"torn")
    capsys.readouterr()
    assert score(*command, "--json") == 0
    actual = json.loads(capsys.readouterr().out)
    assert actual["items"] == COUNT and actual["skipped"] > 0
    assert column(tmp_path / "out", "id") == list(range(COUNT))
    assert parts(tmp_path / "out") == parts(clean) and not list((tmp_path / "out").glob(".part*"))


def test_a_file_that_is_damaged_or_gone_is_made_again(plan: Path, table: Path, tmp_path: Path) -> None:
    assert score(plan, table, "-o", tmp_path / "out") == 0
    before = parts(tmp_path / "out")
    (tmp_path / "out" / "part-00000.parquet").write_bytes(before["part-00000.parquet"][:-9])
    (tmp_path / "out" / "part-00001.parquet").unlink()
    assert score(plan, table, "-o", tmp_path / "out") == 0 and parts(tmp_path / "out") == before


def test_another_run_does_not_write_into_the_same_folder(plan: Path, table: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert score(plan, table, "-o", out) == 0
    before = parts(out)
    (tmp_path / "other").mkdir()
    other = plan_of(CLASSES, tmp_path / "other", max_batch=8)
    for change, error in (((plan, table, "--batch", 2), "options: batch was 4, is 2"), ((other, table), "plan: sha256"),
                          ((plan, table, "--columns", "id"), "options: columns was null"),
                          ((plan, table, "--split-items", 1), "inputs: splits was 3, is 12")):
        assert score(*change, "-o", out) == 2
        assert f"{out} holds results of another run: its {error}" in capsys.readouterr().err
    os.utime(table, ns=(1, 1))
    assert score(plan, table, "-o", out) == 2 and "inputs: digest was" in capsys.readouterr().err
    assert parts(out) == before
    (out / "_score.json").unlink()
    assert score(plan, table, "-o", out) == 2 and "was not written by score" in capsys.readouterr().err


def test_two_runs_at_a_time_are_refused(plan: Path, table: Path, tmp_path: Path, capsys: Any) -> None:
    from infer_server.batch.results import Results
    with Results(tmp_path / "out").claimed({}):
        assert score(plan, table, "-o", tmp_path / "out") == 2
    assert "another run writes to" in capsys.readouterr().err


def test_an_onnx_file_is_built_and_its_plan_kept(tmp_path: Path, table: Path, plan: Path, capsys: Any) -> None:
    random = np.random.default_rng(0)
    numbers = [", ".join(f"{number:.3f}" for number in random.standard_normal(count)) for count in (80, 96)]
    model = onnx.parser.parse_model(CLASSES.replace("WEIGHTS", numbers[0]).replace("OTHERS", numbers[1]))
    onnx.save(model, tmp_path / "gray.onnx")
    command = (tmp_path / "gray.onnx", table, "-o", tmp_path / "out", "--batch", 4, "-q")
    assert score(*command) == 0 and (tmp_path / "out" / "_model.plan").exists()
    want = scores_of(plan, pictures(COUNT))
    np.testing.assert_allclose(column(tmp_path / "out", "scores"), want, rtol=1e-5, atol=1e-5)
    capsys.readouterr()
    assert score(*command, "--json") == 0 and json.loads(capsys.readouterr().out)["skipped"] == COUNT
    onnx.save(onnx.parser.parse_model(CLASSES.replace("WEIGHTS", numbers[0]).replace("OTHERS", numbers[1])
                                      .replace("gray (", "grey (")), tmp_path / "gray.onnx")
    assert score(*command) == 2 and "plan: model: " in capsys.readouterr().err


def test_texts_of_unequal_lengths_are_read_from_parquet(tmp_path: Path) -> None:
    rows = [[[1.0, 1.0]] * length for length in (2, 5, 2, 1)]
    pq.write_table(pa.table({"x": rows, "shift": pa.array([0, 1, 2, 3])}), tmp_path / "texts.parquet")
    assert score(plan_of(TEXT, tmp_path, max_batch=4), tmp_path / "texts.parquet", "-o", tmp_path / "out") == 0
    assert column(tmp_path / "out", "y") == [[2.0 + shift] * len(row) for shift, row in enumerate(rows)]


@pytest.mark.parametrize("files, error", [
    ({}, "holds no images, .npz, .npy or Parquet files"), ({"a.png": b"", "b.npz": b""}, "arrays (b.npz, ...) and "),
    ({"a.parquet": b"x"}, "a.parquet cannot be read as Parquet"), (None, "does not exist")])
def test_an_input_that_cannot_be_scored_is_refused(plan: Path, tmp_path: Path, capsys: Any,
                                                   files: dict[str, bytes] | None, error: str) -> None:
    folder = tmp_path / "in"
    for name, data in (files or {}).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    if files is not None:
        folder.mkdir(exist_ok=True)
    assert score(plan, folder, "-o", tmp_path / "out") == 2
    assert error in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_without_pyarrow_the_error_says_what_to_install(plan: Path, tmp_path: Path, capsys: Any,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert score(plan, tmp_path, "-o", tmp_path / "out") == 2
    assert "pip install 'infer-server[score]'" in capsys.readouterr().err
