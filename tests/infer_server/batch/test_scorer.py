"""Scorer: batches of Arrow, pandas and NumPy; columns, shapes and dtypes of rows; rows that cannot be scored."""
from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from infer_server import Scorer, load_engine
from infer_server.batch.frames import FileFrame
from infer_server.engines.errors import ConfigError, InputError
from infer_server.engines.ir.graph import Array
from tests.infer_server.batch.models import COUPLED, TEXT, WHOLE, pictures, plan_of

COUNT = 10


@pytest.fixture(scope="module")
def expected(plan: Path) -> dict[str, Array]:
    """Return the outputs of one engine in a loop over batches of four."""
    engine, images = load_engine(plan), pictures(COUNT)
    parts = [engine.run(images[start:start + 4]) for start in range(0, COUNT, 4)]
    return {name: np.concatenate([part[name] for part in parts]) for name in ("scores", "grid")}


def lists(values: Array, *sizes: int) -> Any:
    array = pa.array(values.reshape(-1))
    for size in reversed(sizes):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def tensor(values: Array) -> Any:
    return pa.FixedShapeTensorArray.from_numpy_ndarray(values)


@pytest.mark.parametrize("column", [
    lists(pictures(COUNT), 16), lists(pictures(COUNT), 1, 4, 4), tensor(pictures(COUNT)),
    pa.array(pictures(COUNT).reshape(COUNT, 16).tolist(), pa.list_(pa.float32())),
    pa.array(pictures(COUNT).tolist(), pa.large_list(pa.list_(pa.list_(pa.float32())))),
    pa.chunked_array([lists(pictures(COUNT), 16)[:3], lists(pictures(COUNT), 16)[3:]])],
    ids=["flat", "nested", "tensor", "lists", "large", "chunks"])
def test_an_arrow_table_gets_columns_of_fixed_shapes(plan: Path, expected: dict[str, Array], column: Any) -> None:
    scorer, table = Scorer(plan), pa.table({"id": np.arange(COUNT), "image": column})
    scored = scorer(table)
    assert scored.schema == scorer.schema(table.schema) and scored.column_names == ["id", "scores", "grid"]
    assert scored.schema.field("grid").type == pa.list_(pa.list_(pa.float32(), 3), 2)
    for name, values in expected.items():
        np.testing.assert_array_equal(np.array(scored[name].to_pylist(), np.float32), values)
    batch, = table.combine_chunks().to_batches()
    assert isinstance(scorer(batch), pa.RecordBatch) and pa.table(scorer(batch)) == scored
    streamed, = scorer.stream([batch])
    assert streamed.schema.field("grid").type == pa.list_(pa.list_(pa.float32()))
    assert streamed.to_pylist() == scored.to_pylist()


def test_pandas_and_numpy_come_back_as_they_were_given(plan: Path, expected: dict[str, Array]) -> None:
    scorer = pickle.loads(pickle.dumps(Scorer(plan)))
    arrays = scorer({"id": np.arange(COUNT), "image": pictures(COUNT)})
    assert list(arrays) == ["id", "scores", "grid"]
    images = list(pictures(COUNT).reshape(COUNT, 16))
    frame = pd.DataFrame({"id": np.arange(COUNT), "image": images}, index=range(5, 15))
    scored = scorer(frame)
    assert list(scored.index) == list(frame.index) and list(scored.columns) == ["id", "scores", "grid"]
    for name, values in expected.items():
        np.testing.assert_array_equal(arrays[name], values)
        np.testing.assert_array_equal(np.array([np.stack(cell) for cell in scored[name]]), values)
    assert pa.Table.from_pandas(scored)["grid"].type == pa.list_(pa.list_(pa.float32()))


def test_columns_are_chosen_and_renamed(plan: Path, expected: dict[str, Array]) -> None:
    scorer = Scorer(plan, inputs={"image": "pixels"}, outputs={"scores": "s"}, columns=["id"])
    scored = scorer({"pixels": pictures(COUNT), "id": np.arange(COUNT), "other": np.arange(COUNT)})
    assert list(scored) == ["id", "s"]
    np.testing.assert_array_equal(scored["s"], expected["scores"])
    assert list(Scorer(plan, outputs=["grid"])({"image": pictures(1)})) == ["grid"]


def test_the_largest_scores_come_with_their_labels(plan: Path, expected: dict[str, Array]) -> None:
    table = pa.table({"image": lists(pictures(COUNT), 16)})
    scored = Scorer(plan, outputs=["scores"], top_k=2, labels=list("abcde"))(table)
    order = np.argsort(-expected["scores"], axis=1)[:, :2]
    assert scored["scores_index"].to_pylist() == order.tolist()
    assert scored["scores_label"].to_pylist() == np.array(list("abcde"))[order].tolist()
    best = np.take_along_axis(expected["scores"], order, 1)
    np.testing.assert_array_equal(np.array(scored["scores_score"].to_pylist(), np.float32), best)


def test_rows_of_unequal_lengths_run_by_length_and_stay_in_order(tmp_path: Path) -> None:
    scorer = Scorer(plan_of(TEXT, tmp_path, max_batch=4))
    rows = [np.full((length, 2), length, np.float32) for length in (3, 1, 3, 2, 1)]
    table = pa.table({"x": [row.tolist() for row in rows], "shift": pa.array([0, 1, 2, 3, 4], pa.int32())})
    scored = scorer(table)
    assert scored["y"].to_pylist() == [(row.sum(axis=1) + shift).tolist() for shift, row in enumerate(rows)]
    frame = scorer(table.to_pandas())
    assert [list(cell) for cell in frame["y"]] == scored["y"].to_pylist()
    assert scored.schema == scorer.schema(table.schema)


def test_a_model_without_a_batch_runs_row_by_row(tmp_path: Path) -> None:
    scored = Scorer(plan_of(WHOLE, tmp_path))({"x": np.arange(6, dtype=np.float32).reshape(2, 3),
                                               "w": np.arange(4, dtype=np.float32).reshape(2, 2)})
    assert scored["y"].tolist() == [[0, 2, 4], [6, 8, 10]] and scored["z"].tolist() == [[0, 2], [4, 6]]


def test_items_that_depend_on_each_other_are_scored_alone(tmp_path: Path) -> None:
    scored = Scorer(plan_of(COUPLED, tmp_path, max_batch=4))({"x": np.arange(6, dtype=np.float32).reshape(2, 3)})
    assert not scored["y"].any()


def encoded(values: Array) -> bytes:
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def test_encoded_pictures_are_preprocessed(plan: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 4), np.uint8)
    data = [encoded(picture) for picture in pixels]
    want = Scorer(plan)({"image": (pixels / 255).astype(np.float32)[:, None]})["scores"]
    struct = pa.array([{"bytes": item, "path": None} for item in data])
    for column in (pa.array(data), struct):
        scored = Scorer(plan, preprocess="gray")(pa.table({"image": column}))
        np.testing.assert_allclose(np.array(scored["scores"].to_pylist()), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="row 1 .*cannot be read as an image"):
        Scorer(plan)({"image": np.array([data[0], b"no picture", data[2]], object)})


def test_rows_that_cannot_be_scored_are_refused_or_left_out(plan: Path) -> None:
    rows = [*pictures(3).reshape(3, 16).tolist(), None, [1.0] * 15]
    images = pa.array([rows[3], rows[0], rows[4], *rows[1:3]], pa.list_(pa.float32()))
    table = pa.table({"id": range(5), "image": images})
    with pytest.raises(InputError, match="row 0 of 2 .*column 'image' is null"):
        Scorer(plan)(table)
    scorer = Scorer(plan, skip_bad=True)
    assert scorer(table)["id"].to_pylist() == [1, 3, 4]
    assert list(scorer(table.to_pandas())["id"]) == [1, 3, 4]
    _, bad = scorer.score(table)
    assert set(bad) == {0, 2} and "shape [15]; the model takes [1, 4, 4]" in bad[2]
    none = scorer(table.slice(0, 1))
    assert none.num_rows == 0 and none.schema == scorer.schema(table.schema)


@pytest.mark.parametrize("batch, error", [
    ({"imge": pictures(1)}, "no column 'image'; did you mean 'imge'"), (3, "this is a int"),
    ({"image": pictures(1), "scores": [1]}, "column 'scores' is kept and named like an output"),
    ({"image": pictures(2), "id": [1]}, "different numbers of rows"),
    ({"image": np.zeros((1, 1, 4, 4), np.uint8)}, "input 'image' is uint8; the model takes float32")])
def test_a_batch_that_does_not_fit_is_refused(plan: Path, batch: Any, error: str) -> None:
    with pytest.raises(InputError, match=error):
        Scorer(plan)(batch)


@pytest.mark.parametrize("options, error", [
    ({"inputs": {"img": "x"}}, "no input 'img'"), ({"outputs": ["score"]}, "no output 'score'; did you mean 'scores'"),
    ({"labels": ["a"]}, "give top_k"), ({"top_k": 1}, "'grid' has 2 axes"),
    ({"top_k": 1, "outputs": ["scores"], "labels": ["a"]}, "1 labels.* 5 classes")])
def test_options_that_do_not_fit_are_refused(plan: Path, options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Scorer(plan, **options)({"image": pictures(1)})


def test_files_of_which_no_row_is_left_keep_the_types_of_their_columns() -> None:
    frame = FileFrame({"path": np.array(["a"], object), "item": np.array([1])})
    assert frame.scored(["path", "item"], np.array([], int), {}).schema == pa.schema(
        {"path": pa.string(), "item": pa.int64()})


def test_scoring_a_plan_loads_no_compiler(plan: Path) -> None:
    program = f"""if True:
        import sys, numpy
        from infer_server import Scorer
        Scorer({str(plan)!r})({{"image": numpy.zeros((1, 1, 4, 4), numpy.float32)}})
        print(sorted(set(sys.modules) & {{"onnx", "llvmlite", "grpc", "pyarrow", "infer_server.engines.compiler"}}))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
