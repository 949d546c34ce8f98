"""A failing model is cut to the part that fails, and the part is a model that fails by the printed command."""
import shlex

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer_server.calibration.accuracy.oracle import oracle_of
from infer_server.cli.build_engine import main as build_engine
from infer_server.engines.errors import ConfigError
from infer_server.reducing.checks import Check, Checker, Verdict
from infer_server.reducing.cli import main
from infer_server.reducing.fragments import Fragment, FragmentExtractor, inner_tensors, read_values
from infer_server.reducing.reduction import reduce_model
from infer_server.reducing.search import Search


def saved(path, nodes, weights, inputs=(("x", TensorProto.FLOAT, ["N", 8]),), outputs=("y",)):
    graph = helper.make_graph(
        nodes, "failing", [helper.make_tensor_value_info(*one) for one in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(values, name) for name, values in weights.items()])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my.operators", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@pytest.fixture
def overflowing(tmp_path):
    """Return a chain of 16 nodes whose fifth product exceeds float16: the sixth reads infinities."""
    rng = np.random.default_rng(0)
    factors = {3: 3e3, 4: 3e3, 5: 1e-6}
    weights = {f"w{i}": (rng.standard_normal((8, 8)) * factors.get(i, 1.0) / 2).astype(np.float32) for i in range(8)}
    nodes, x = [], "x"
    for i in range(8):
        nodes += [helper.make_node("MatMul", [x, f"w{i}"], [f"m{i}"], name=f"product{i}"),
                  helper.make_node("Relu", [f"m{i}"], ["y" if i == 7 else f"r{i}"], name=f"relu{i}")]
        x = f"r{i}"
    return saved(tmp_path / "model.onnx", nodes, weights)


def test_an_engine_that_overflows_is_cut_to_the_node_that_reads_infinities(overflowing, tmp_path, capsys):
    assert main([str(overflowing), "-o", str(tmp_path / "reduced.onnx"), "--precision", "fp16", "-q"]) == 0
    reduced = onnx.load(tmp_path / "reduced.onnx")
    onnx.checker.check_model(reduced, full_check=True)
    assert [node.name for node in reduced.graph.node] == ["product5"]
    assert [value.name for value in reduced.graph.input] == ["r4"] == list(read_values(tmp_path / "reduced.npz"))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("reproduce: "))
    command = shlex.split(line.removeprefix("reproduce: "))
    assert command[0] == "build-engine"
    command[command.index("-o") + 1] = str(tmp_path / "reduced.plan")
    assert build_engine([*command[1:], "--no-cache"]) == 1      # not verified


def test_a_model_that_cannot_be_built_is_cut_to_the_operator(tmp_path, capsys):
    names = ["x", *(f"t{i}" for i in range(9)), "y"]
    nodes = [helper.make_node("Relu", [a], [b], name=f"relu {b}")
             for a, b in zip(names, names[1:], strict=False)]
    nodes[6] = helper.make_node("Fancy", ["t5"], ["t6"], name="fancy", domain="my.operators")
    model = saved(tmp_path / "model.onnx", nodes, {})
    assert main([str(model), "-o", str(tmp_path / "reduced.onnx"), "--check", "build-fails", "-q"]) == 0
    reduced = onnx.load(tmp_path / "reduced.onnx").graph.node
    # No value after Fancy is known, so its result cannot be an output; all before it is cut off.
    assert [node.op_type for node in reduced] == ["Fancy", "Relu", "Relu", "Relu"]
    assert "Fancy" in capsys.readouterr().out


def test_a_users_function_decides_and_its_command_shows_the_failure(overflowing, tmp_path, capsys):
    (tmp_path / "check.py").write_text(
        "import onnx\n"
        "def fails(model, inputs):\n"
        "    names = [node.name for node in onnx.load(model).graph.node]\n"
        "    return 'both are there' if {'relu1', 'product6'} <= {*names} else False\n"
        "def raises(model, inputs):\n"
        "    raise ValueError('it is me')\n")
    check = f"{tmp_path / 'check.py'}:fails"
    assert main([str(overflowing), "-o", str(tmp_path / "r.onnx"), "--check", check, "-q"]) == 0
    names = [node.name for node in onnx.load(tmp_path / "r.onnx").graph.node]
    assert names[0] == "relu1" and names[-1] == "product6"
    command = capsys.readouterr().out.partition("reproduce: ")[2].split()
    assert main(command[1:]) == 1 and "fails: both are there" in capsys.readouterr().out
    assert main([str(overflowing), "--check", f"{tmp_path / 'check.py'}:raises", "--check-only"]) == 2
    assert "raised ValueError: it is me" in capsys.readouterr().err


def test_a_process_that_dies_or_hangs_is_a_verdict(tmp_path):
    (tmp_path / "check.py").write_text("import os, time\n"
                                       "def dies(model, inputs): os._exit(7)\n"
                                       "def hangs(model, inputs): time.sleep(60)\n")
    np.savez(tmp_path / "x.npz")
    for name, timeout, verdict in (("dies", 300.0, Verdict("crash", "the process ended with exit status 7")),
                                   ("hangs", 0.5, Verdict("timeout", "the check took more than 0.5 s"))):
        checker = Checker(Check(f"{tmp_path / 'check.py'}:{name}"), timeout)
        assert checker(tmp_path / "m.onnx", tmp_path / "x.npz") == verdict
        checker.close()


def test_a_model_that_passes_is_refused(overflowing, tmp_path):
    with pytest.raises(ConfigError, match="passes the check 'differs'"):
        reduce_model(overflowing, tmp_path / "r.onnx", Check())
    assert not (tmp_path / "r.onnx").exists()
    with pytest.raises(ConfigError, match="would overwrite"):
        reduce_model(overflowing, overflowing, Check())
    with pytest.raises(ConfigError, match="a folder that exists"):
        reduce_model(overflowing, tmp_path / "none" / "r.onnx", Check())
    with pytest.raises(ConfigError, match="did you mean 'differs'"):
        Check("difers")
    assert main([str(overflowing), "--check", "build-fails", "--check-only"]) == 0


# ---- the search, without a process
def cut_model(path):
    proto = onnx.load(path)
    feed = {"x": np.ones((1, 8), np.float32)}
    return FragmentExtractor(proto, {**feed, **oracle_of(path, shown=inner_tensors(proto)).answer(feed)})


def names_of(model, fragment):
    return [node.name for node in model.extract(fragment).graph.node]


@pytest.mark.parametrize("culprits", [("product0",), ("relu7",), ("relu2", "product3"), ("product1", "relu4", "relu6")])
def test_the_search_finds_all_culprits_and_nothing_that_it_can_do_without(overflowing, culprits):
    model = cut_model(overflowing)
    search = Search(model, lambda one: {*culprits} <= {*names_of(model, one)}, 500, lambda name, nodes: None)
    actual = names_of(model, search.run())
    first, last = (int(name[-1]) * 2 + name.startswith("relu") for name in (culprits[0], culprits[-1]))
    assert actual[0] == culprits[0] and actual[-1] == culprits[-1] and len(actual) == last - first + 1
    assert search.complete and search.checks < 60


def test_the_search_stops_at_the_most_checks(overflowing):
    model = cut_model(overflowing)
    search = Search(model, lambda one: "product6" in names_of(model, one), 3, lambda name, nodes: None)
    assert "product6" in names_of(model, search.run()) and search.checks == 3 and not search.complete


def test_shapes_become_constants_and_branches_keep_what_they_read(tmp_path):
    x = ("x", TensorProto.FLOAT, ["N", 8])
    branch = helper.make_graph([helper.make_node("Neg", ["r"], ["z"])], "branch", [],
                               [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)])
    other = helper.make_graph([helper.make_node("Abs", ["r"], ["z"])], "other", [],
                              [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)])
    path = saved(tmp_path / "m.onnx", [
        helper.make_node("Relu", ["x"], ["r"], name="relu"), helper.make_node("Shape", ["x"], ["s"], name="shape"),
        helper.make_node("Constant", [], ["c"], value_float=1.0), helper.make_node("Add", ["r", "c"], ["a"]),
        helper.make_node("Reshape", ["a", "s"], ["b"], name="reshape"),
        helper.make_node("ReduceMax", ["b"], ["m"], keepdims=0), helper.make_node("Greater", ["m", "c"], ["g"]),
        helper.make_node("If", ["g"], ["y"], then_branch=branch, else_branch=other, name="if")], {}, [x])
    model = cut_model(path)
    reshape = model.extract(Fragment((4,), ("b",)))
    assert [value.name for value in reshape.graph.input] == ["a"] and reshape.graph.initializer[0].name == "s"
    loose = model.extract(Fragment((4,), ("b",), frozen=False))
    assert [value.name for value in loose.graph.input] == ["a", "s"]
    whole = model.needed(Fragment(tuple(range(8)), ("y",)))
    assert 0 in whole.nodes                     # the branches read r
    assert {*model.inputs_of(Fragment((7,), ("y",), frozen=False))} == {"g", "r"}
    add = model.extract(Fragment((3,), ("a",)))  # a Constant comes with its reader
    assert [node.op_type for node in add.graph.node] == ["Constant", "Add"]
    onnx.checker.check_model(add, full_check=True)
