"""Tests of config.pbtxt: strict parsing, completion from the model, and errors that say how to correct it."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor

from infer_server.batching.policy import BatchPolicy, Priorities, QueuePolicy
from infer_server.config.autocomplete import complete
from infer_server.config.config import from_message
from infer_server.config.fields import LIMITS, TREATMENTS, Verdict, treatment
from infer_server.config.pbtxt import read_config
from infer_server.config.steps import EnsembleStep, called_models
from infer_server.errors import ModelConfigError, RepositoryError, UnknownModelError
from infer_server.protos import model_config
from infer_server.repository.building import build_command
from infer_server.repository.folders import read_model
from infer_server.repository.roots import LocalFolder, root_of
from scripts.testing.numpy_engine import NumpyEngine, NumpyTensor, write_model


def parsed(text: str) -> model_config.ModelConfig:
    return text_format.Parse(text, model_config.ModelConfig())


class Ensembles(dict[str, list[str]]):
    """Models of ensembles by the ensemble's name; counts how often each is read."""

    def __init__(self, calls: dict[str, list[str]]) -> None:
        super().__init__(calls)
        self.reads = Counter[str]()

    def steps(self, name: str) -> list[EnsembleStep]:
        self.reads[name] += 1
        return [EnsembleStep(model, "", {"x": "x"}, {"y": "y"}) for model in self.get(name, ())]


def test_the_models_of_an_ensemble_are_read_once_and_come_in_the_order_of_their_loads() -> None:
    calls = Ensembles({"e3": ["e2", "e2", "a"], "e2": ["e1", "e1"], "e1": ["a", "b"]})
    assert called_models("e3", calls.steps) == ["a", "b", "e1", "e2"]
    assert set(calls.reads.values()) == {1}


@pytest.mark.parametrize(("calls", "refusal"), [
    ({f"e{k}": [f"e{k - 1}"] for k in range(1, 10_000)}, "17 ensembles call each other, more than the limit of 16"),
    ({f"e{k}": [f"e{k - 1}"] * 2 for k in range(1, 17)}, r"'e10' has 2046 steps .* more than the limit of 1024"),
    ({"e2": ["e3"], "e3": ["e2"], "e1": ["e2"]}, "e2 -> e3 -> e2 is a cycle"),
], ids=["a chain", "diamonds", "a circle"])
def test_ensembles_of_ensembles_are_bounded(calls: dict[str, list[str]], refusal: str) -> None:
    ensembles = Ensembles(calls)
    with pytest.raises(ModelConfigError, match=refusal):
        called_models([*calls][-1], ensembles.steps)
    assert len(ensembles.reads) <= 18


NUMBERS = {getattr(FieldDescriptor, f"CPPTYPE_{name}")
           for name in ("INT32", "INT64", "UINT32", "UINT64", "FLOAT", "DOUBLE")}
STEPS = """input {{ name: "x" data_type: TYPE_FP32 dims: 1 }} output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}
    ensemble_scheduling {{
      step {{ model_name: "a" input_map {{ key: "i" value: "{}" }} output_map {{ key: "o" value: "{}" }} }}
      step {{ model_name: "b" input_map {{ key: "i" value: "{}" }} output_map {{ key: "o" value: "{}" }} }} }}"""


def test_the_settings_of_the_dynamic_batcher_are_read() -> None:
    config = from_message(parsed("""
        name: "m"  max_batch_size: 16
        input { name: "x" data_type: TYPE_FP16 dims: [3, -1] }
        dynamic_batching {
          preferred_batch_size: [4, 8]  max_queue_delay_microseconds: 500
          default_queue_policy {
            timeout_action: DELAY  default_timeout_microseconds: 9  allow_timeout_override: true  max_queue_size: 7
          }
        }
        instance_group [{ count: 2 kind: KIND_CPU }, { count: 1 }]
        version_policy { specific { versions: [2, 5] } }
        parameters { key: "precision" value { string_value: "int8" } }
        runtime: "libtriton_onnxruntime.so"
    """))
    assert config.batching == BatchPolicy(16, frozenset({4, 8}), 500)
    assert config.queueing == Priorities((QueuePolicy(7, 9, True, True),))
    assert (config.instances, config.versions.specific, config.build.precision) == (3, (2, 5), "int8")
    assert config.inputs[0].describe(batched=True) == "x FP16 [-1, 3, -1]"
    assert config.notices == (f"runtime: {treatment('runtime').note}",)


@pytest.mark.parametrize(("text", "refusal"), [
    ("max_batch_size: -1", "expected 0 or more"),
    ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 5 }", "5 is not within 1..4"),
    ("ensemble_scheduling {}", "needs a step"),
    ('platform: "ensemble"', "needs its steps"),
    (STEPS.format("x", "mid", "nowhere", "y"), r"step 1 \('b'\) reads 'nowhere', which is neither"),
    (STEPS.format("x", "y", "y", "y"), r"'y' is made twice, the second time by step 1 \('b'\)"),
    (STEPS.format("y", "mid", "mid", "y"), r"steps \[0, 1, 0\] wait for each other"),
    (STEPS.format("x", "mid", "mid", "last"), "output 'y' is made by no step"),
    (f'platform: "ensemble" backend: "python" {STEPS.format("x", "mid", "mid", "y")}',
     "backend: 'python' executes a model"),
    (f"instance_group {{}} {STEPS.format('x', 'mid', 'mid', 'y')}", "instance_group: an ensemble executes nothing"),
    (f"model_warmup {{}} {STEPS.format('x', 'mid', 'mid', 'y')}", "model_warmup: an ensemble executes nothing"),
    ("instance_group { kind: KIND_CPU gpus: 0 }", "KIND_CPU has no gpus; remove them"),
    ("instance_group { gpus: [0, -1] }", "GPUs count from 0, got -1"),
    ("response_cache { enable: true } sequence_batching {}", "response_cache: a sequence's responses are not cached"),
    ("dynamic_batching { priority_levels: 2 }", "write default_priority_level: 2"),
    ("dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value {} } }",
     "no level 3 of the 2"),
    ("instance_group { passive: true }", "remove the group"),
    ("instance_group { count: 1000 } instance_group { count: 25 }", "1025 instances are more than the limit of 1024"),
    ("instance_group { count: 2 } dynamic_batching { preserve_ordering: true }", "count of 1"),
    ("dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }", "2 priority_levels"),
    ("dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }", "DELAY changes"),
    ("dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1 "
     "priority_queue_policy { key: 1 value { timeout_action: DELAY } } }", "DELAY changes"),
    ('input { name: "x" dims: 1 }', "data_type is missing"),
    ('input { name: "x" data_type: TYPE_FP32 dims: 0 }', "must be positive"),
    ('input { name: "x" data_type: TYPE_FP32 dims: [2, -1] reshape { shape: [-1, 2] } }',
     "must keep the open extents of dims"),
    ('platform: "tensorflow_savedmodel"', "export the model to ONNX"),
    ('backend: "onnxruntim"', r"ensemble\. Did you mean 'onnxruntime'\? Or export the model to ONNX"),
    ('backend: "tensorrtllm"', "'tensorrtllm' is not served: write it as a Python model, model.py"),
    ("model_repository_agents {} model_operations {}", "model_operations: .*; model_repository_agents: "),
    ('parameters { key: "precison" value { string_value: "int8" } }', "Did you mean 'precision'?"),
    ('parameters { key: "precision" value { string_value: "int4" } }', "expected one of .*, got 'int4'"),
    *((f'default_model_filename: "{path}"', "a file in the version's folder")
      for path in ("../../secret", "a/../../../secret", "/etc/secret", "a/", ".", "..")),
    ("version_policy { specific {} }", "names no versions"),
    ("sequence_batching { oldest { max_candidate_sequences: -1 } }", "max_candidate_sequences: expected 0 or more"),
    *((f'sequence_batching {{ state {{ input_name: "a" output_name: "b" data_type: TYPE_FP32 {dims} }} }}',
       refusal) for dims, refusal in (
           ("dims: [4611686018427387904, 4]", "state.dims: 4611686018427387904 is more than the limit of 2147483647"),
           ("dims: [100000, 1000000]", "state 'a': .* takes 400000000000 bytes, more than the limit of 1073741824"),
           ("dims: 1 " * 70, "state 'a': an array of dims"),
           ('dims: 1 initial_state { data_type: TYPE_FP32 dims: 1000000000 zero_data: true name: "z" }',
            "initial_state: .* more than the limit"))),
    *((f"{path} {{ {field}: {value} }}" if path else f"{field}: {value}",
       f"{path}{'.' * bool(path)}{field}: {value} is more than the limit of {most}") for path, field, value, most in (
           ("", "max_batch_size", (1 << 31) - 1, 1 << 20),
           ("instance_group", "count", (1 << 31) - 1, 1024),
           ("dynamic_batching", "priority_levels", 1 << 63, 64),
           ("model_warmup", "count", (1 << 32) - 1, 10_000),
           ("model_warmup", "batch_size", (1 << 32) - 1, 1 << 20))),
    ("sequence_batching { oldest { max_candidate_sequences: 2147483647 } }", "more than the limit of 65536"),
    ("sequence_batching { oldest { preferred_batch_size: -2147483648 } }", "-2147483648 is not within 1..1"),
    ('backend: "python" instance_group { count: 257 }', "257 instances are more than the limit of 256"),
    ('parameters { key: "threads" value { string_value: "100000" } }', "parameter threads: 100000 is more than .* 256"),
    ('parameters { key: "intra_op_thread_count" value { string_value: "2147483648" } }', "more than the limit of 256"),
    (f'parameters {{ key: "threads" value {{ string_value: "{"9" * 9000}" }} }}', "more than the limit of 256"),
    ('parameters { key: "max_batch" value { string_value: "1048577" } }', "1048577 is more than the limit of 1048576"),
    ('instance_group { count: 64 } parameters { key: "threads" value { string_value: "17" } }',
     "64 instances of 17 threads are 1088 threads, more than the limit of 1024"),
])
def test_what_makes_no_sense_or_is_not_served_is_refused_by_name(text: str, refusal: str) -> None:
    with pytest.raises(ModelConfigError, match=refusal):
        from_message(parsed(text))


@pytest.mark.parametrize(("text", "refusal"), [
    ("\n\nmax_batchsize: 4", r":3: .*max_batchsize.*Did you mean 'max_batch_size'\?"),
    ("dynamic_batching {\n  max_queue_delay_micros: 4 }", r":2: .*Did you mean 'max_queue_delay_microseconds'\?"),
    ("max_batch_size: many", ":1: .*many"),
    ('input {\n data_type: FP32 }', ":2: .*FP32"),
    ("input { data_type: 99999999999999999999 }", ": Value out of range: 99999999999999999999"),
])
def test_a_spelling_mistake_is_shown_with_its_line_and_the_nearest_field(
        tmp_path: Path, text: str, refusal: str) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(text)
    with pytest.raises(ModelConfigError, match="config.pbtxt" + refusal):
        read_config(path)


def test_an_empty_configuration_is_completed_wholly() -> None:
    completed = complete(parsed(""), "m", NumpyEngine(kind="two", shape=(2, 3)), "model.plan")
    assert [(t.name, t.data_type, list(t.dims)) for t in completed.input] == [
        ("x", model_config.TYPE_FP32, [2, 3]), ("x2", model_config.TYPE_FP32, [2, 3])]
    assert completed.max_batch_size == 8 and completed.HasField("dynamic_batching")
    assert completed.version_policy.latest.num_versions == 1


def test_what_the_configuration_says_is_kept() -> None:
    given = parsed('max_batch_size: 2 output { name: "y" data_type: TYPE_FP32 dims: -1 label_filename: "labels.txt" }')
    completed = complete(given, "m", NumpyEngine(), "model.plan")
    assert completed.max_batch_size == 2
    assert (list(completed.output[0].dims), completed.output[0].label_filename) == ([-1], "labels.txt")
    assert completed.input[0].name == "x"


@pytest.mark.parametrize(("text", "refusal"), [
    ('name: "other"', "expected 'm', the name of its folder"),
    ("max_batch_size: 9", "built for a batch of 8 at most; lower it, or rebuild with --max-batch 9"),
    ('input { name: "xx" data_type: TYPE_FP32 dims: 4 }', "the model has x. Did you mean 'x'?"),
    ('input { name: "x" data_type: TYPE_FP16 dims: 4 }', "data_type is TYPE_FP16, but the model's is TYPE_FP32"),
    ('input { name: "x" data_type: TYPE_FP32 dims: [8, 4, 1] }', r"\[8, 4, 1\], but the model's are \[4\] without"),
])
def test_a_contradiction_between_configuration_and_model_is_named(text: str, refusal: str) -> None:
    with pytest.raises(ModelConfigError, match=refusal):
        complete(parsed(text), "m", NumpyEngine(), "model.plan")


def test_a_model_whose_items_depend_on_each_other_is_not_batched_dynamically() -> None:
    engine = NumpyEngine(dependence="node 's' (ReduceSum) reduces the axis of the items")
    completed = complete(parsed(""), "m", engine, "model.plan")
    assert completed.max_batch_size == 8 and not completed.HasField("dynamic_batching")
    assert not from_message(completed).batching.merges


def test_a_model_with_a_tensor_out_of_the_batch_takes_whole_shapes() -> None:
    engine = NumpyEngine()
    outputs = [NumpyTensor("anchors", "float32", (4,))]
    with patch.object(NumpyEngine, "outputs", outputs):
        completed = complete(parsed(""), "m", engine, "model.plan")
        assert completed.max_batch_size == 0 and not completed.HasField("dynamic_batching")
        assert [list(tensor.dims) for tensor in (*completed.input, *completed.output)] == [[-1, 4], [4]]
        with pytest.raises(ModelConfigError, match=r"output 'anchors' of shape \[4\] has no batch axis"):
            complete(parsed("max_batch_size: 8"), "m", engine, "model.plan")


def leaves(descriptor: Any, above: str = "") -> Iterator[str]:
    """Yield the paths of all fields that hold values, maps or empty messages."""
    for field in descriptor.fields:
        inner = field.message_type
        is_leaf = inner is None or inner.GetOptions().map_entry or not inner.fields
        yield from [above + field.name] if is_leaf else leaves(inner, f"{above}{field.name}.")


def test_every_field_of_the_descriptor_is_served_mapped_reported_or_refused_with_a_remedy() -> None:
    paths = set(leaves(model_config.ModelConfig.DESCRIPTOR))
    assert len(paths) > 100
    for path in paths:
        assert treatment(path).verdict is Verdict.SERVED or treatment(path).note
    known = {above for path in paths for above in (path, *(path[:i] for i, c in enumerate(path) if c == "."))}
    assert not TREATMENTS.keys() - known, "there are no such fields"


def test_every_number_has_a_limit_or_costs_nothing() -> None:
    assert set(numbers(model_config.ModelConfig.DESCRIPTOR)) == set(LIMITS)


def numbers(descriptor: Any, above: str = "") -> Iterator[str]:
    """Yield the paths of the fields of a message that are numbers."""
    for field in descriptor.fields:
        inner = field.message_type
        if inner is None and field.cpp_type in NUMBERS:
            yield above + field.name
        elif inner is not None and not inner.GetOptions().map_entry:
            yield from numbers(inner, f"{above}{field.name}.")


def test_what_means_something_else_here_is_reported_and_the_model_is_served() -> None:
    config = from_message(parsed("""
        platform: "onnxruntime_onnx"  instance_group { count: 2 kind: KIND_GPU gpus: [0, 1] }
        optimization { graph { level: 1 }  execution_accelerators {
          gpu_execution_accelerator { name: "tensorrt" parameters { key: "precision_mode" value: "FP16" } } } }
        parameters { key: "intra_op_thread_count" value { string_value: "2" } }
        parameters { key: "owner" value { string_value: "the vision team" } }
    """))
    assert (config.devices, config.requests_gpu) == ((0, 1, 0, 1), True)
    assert (config.build.precision, config.build.threads) == ("fp16", "2")
    reported = {notice.split(":")[0] for notice in config.notices}
    assert reported == {"optimization", "parameters.owner", "optimization.execution_accelerators",
                        "parameters.intra_op_thread_count"}
    completed = complete(parsed('platform: "onnxruntime_onnx" instance_group { kind: KIND_GPU }'), "m", NumpyEngine(),
                         "model.onnx")
    assert (completed.backend, completed.platform) == ("onnxruntime", "onnxruntime_onnx")
    assert completed.instance_group[0].kind == model_config.ModelInstanceGroup.KIND_CPU
    assert completed.instance_group[0].name == "m_0", "as Triton calls one that has no name"


@pytest.mark.parametrize(("text", "dims"), [
    ("max_batch_size: 0", [-1, 4]),
    ('input { name: "x" data_type: TYPE_FP32 dims: [-1, 4] }', [-1, 4]),
    ('input { name: "x" data_type: TYPE_FP32 dims: [2, 4] }', [2, 4]),
    ('max_batch_size: 0 input { name: "x" data_type: TYPE_FP32 dims: [4] reshape { shape: [1, 4] } }', [4]),
])
def test_without_a_max_batch_size_dims_are_whole_shapes(text: str, dims: list[int]) -> None:
    completed = complete(parsed(text), "m", NumpyEngine(), "model.plan")
    assert (completed.max_batch_size, completed.HasField("dynamic_batching")) == (0, False)
    assert (list(completed.input[0].dims), list(completed.output[0].dims)) == (dims, [-1, 4])
    with pytest.raises(ModelConfigError, match=r"they include the batch axis; write dims: \[-1, 4\]"):
        complete(parsed('max_batch_size: 0 input { name: "x" data_type: TYPE_FP32 dims: 4 }'), "m", NumpyEngine(), "f")


def test_versions_are_those_of_the_policy_highest_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for version in (1, 3, 12):
        folder = write_model(tmp_path, "m", version)
    (folder / "notes").mkdir()
    (folder / "007").mkdir()

    def versions(policy: str) -> list[int]:
        (folder / "config.pbtxt").write_text(policy)
        return [source.version for source in read_model(tmp_path, "m")]

    assert versions("") == [12]
    assert versions("version_policy { latest { num_versions: 2 } }") == [12, 3]
    assert versions("version_policy { all {} }") == [12, 3, 1]
    assert versions("version_policy { specific { versions: [1, 12] } }") == [12, 1]
    assert versions("version_policy { specific { versions: [1, 2] } }") == [1]
    assert "version_policy: versions [2] do not exist" in caplog.text
    with pytest.raises(ModelConfigError, match=r"versions \[2\] do not exist; the folder has \[1, 3, 12\]"):
        versions("version_policy { specific { versions: 2 } }")


def test_a_python_model_with_an_environment_of_its_own_is_told_where_its_packages_go() -> None:
    environment = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "env.tar.gz" } }'
    (notice,) = from_message(parsed(f'backend: "python" {environment}')).notices
    assert notice.startswith("parameters.EXECUTION_ENV_PATH: ") and "install there what it imports" in notice


def test_a_folder_without_versions_says_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RepositoryError, match="expected a folder named by a number"):
        read_model(tmp_path, "empty")


@pytest.mark.parametrize("name", ["..", ".", "", "m/1", "nobody"])
def test_names_lead_nowhere_but_to_the_folders_of_the_repository(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, "m")
    with pytest.raises(UnknownModelError):
        root_of([LocalFolder(tmp_path)], name)


def test_an_onnx_file_is_built_with_the_options_of_its_configuration(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", config="""
        max_batch_size: 32
        parameters { key: "precision" value { string_value: "int8" } }
        parameters { key: "calib" value { string_value: "photos" } }
        parameters { key: "preprocess" value { string_value: "imagenet" } }
        parameters { key: "uint8_input" value { string_value: "true" } }
    """)
    (folder / "1" / "model.plan").rename(folder / "1" / "model.onnx")
    (source,) = read_model(tmp_path, "m")
    assert source.file.name == "model.onnx"
    command = build_command(source, tmp_path / "m.plan", tmp_path / "cache", threads=2)
    assert command[2:] == [
        "infer_server.cli.build_engine", "--quiet", str(source.file), "-o", str(tmp_path / "m.plan"), "--int8",
        "--threads", "2", "--cache-dir", str(tmp_path / "cache"), "--max-batch", "32",
        "--batch-first", "--calib", str(folder / "photos"), "--preprocess", "imagenet", "--uint8-input"]
    assert "--cache-dir" not in build_command(source, tmp_path / "m.plan", None, threads=2), "the user's own cache"
    (folder / "config.pbtxt").write_text(
        'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }')
    command = build_command(*read_model(tmp_path, "m"), tmp_path / "m.plan", None, threads=2)
    assert command[command.index("--threads"):] == ["--threads", "2", "--ragged", "x"], "no extent is the batch"
    (folder / "config.pbtxt").write_text('input { name: "x" data_type: TYPE_FP32 optional: true }')
    command = build_command(*read_model(tmp_path, "m"), tmp_path / "m.plan", None, threads=2)
    assert command[command.index("--threads"):] == ["--threads", "2", "--optional", "x"]
    (folder / "config.pbtxt").write_text('parameters { key: "keep_float" value { string_value: "head/*, -a..." } }')
    command = build_command(*read_model(tmp_path, "m"), tmp_path / "m.plan", None, threads=2)
    assert command[command.index("--threads"):] == ["--threads", "2", "--keep-float=head/*", "--keep-float=-a..."]
    (folder / "config.pbtxt").write_text("".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in (("weight_only", "int4"), ("group_size", "64"), ("opt_shapes", "x:1x3"))))
    command = build_command(*read_model(tmp_path, "m"), tmp_path / "m.plan", None, threads=2)
    assert command[command.index("--threads"):] == [
        "--threads", "2", "--weight-only=int4", "--group-size=64", "--opt-shapes=x:1x3"]
    (folder / "config.pbtxt").write_text("""
        parameters { key: "timing" value { string_value: "false" } }
        optimization { execution_accelerators {
          gpu_execution_accelerator { name: "tensorrt" parameters { key: "precision_mode" value: "FP16" } } } }""")
    command = build_command(*read_model(tmp_path, "m"), tmp_path / "m.plan", None, 1, "sm_80")
    assert command[-6:] == ["--fp16", "--threads", "1", "--target", "sm_80", "--no-timing"]
