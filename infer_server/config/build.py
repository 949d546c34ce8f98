"""Build options of a model.onnx that is built when it is loaded: `parameters` and optimization of config.pbtxt."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from infer_server.config.fields import MAX_ITEMS, MAX_THREADS, MAX_TOKENS
from infer_server.config.pbtxt import nearest
from infer_server.errors import ModelConfigError
from infer_server.protos import model_config

PRECISIONS = ("int8", "fp16", "bf16", "fp32", "best")
_DIGITS = 20
_TRUTHS = ("timing", "retune", "uint8_input", "pin", "split_requests")


@dataclass(frozen=True)
class BuildOptions:
    """Options in `parameters`, each named after the option of build-engine or infer-server."""
    precision: str = "fp32"
    calib: str = ""                         # paths are relative to the model's folder
    calibrator: str = ""
    calib_cache: str = ""
    preprocess: str = ""
    keep_float: str = ""                    # ONNX nodes that int8 leaves in float: names or patterns, comma-separated
    weight_only: str = ""                   # int8 or int4: weights of a float model stored in few bits
    group_size: str = ""                    # int4 weights that share a scale
    accuracy_level: str = ""                # 4: rows that int4 weights multiply are rounded to 8 bits
    image_input: str = ""                   # name of an input that also accepts JPEG and PNG files
    uint8_input: str = ""                   # "true": images are sent as uint8 [N, H, W, C]
    timing: str = ""                        # "false": tactics are chosen by the cost model instead of timing
    retune: str = ""                        # "true": time the tactics of a GPU plan that was built without a GPU
    threads: str = ""                       # "": the server's --threads
    specialise: str = ""                    # for models with open extents: wait, background (the default) or off
    min_shapes: str = ""                    # this and the following as build-engine's options
    opt_shapes: str = ""
    max_shapes: str = ""
    max_batch: str = ""                     # items of one execution of a model served with max_batch_size 0
    pin: str = ""                           # "true": pin each thread of an instance to its own CPU
    split_requests: str = ""                # "true": split requests of more than max_batch_size items
    ragged: str = ""                        # "pad": requests of different lengths share a batch, padded to a bucket
    buckets: str = ""                       # lengths to pad to, comma-separated; "": 8, 10, 12, 14, 16, 20, ...
    state_capacity: str = ""                # tokens that growable states of a sequence may have; "": 2048

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ModelConfigError(f"parameter precision: expected one of {', '.join(PRECISIONS)}, got "
                                   f"'{self.precision}'")
        if self.specialise not in ("", "wait", "background", "off"):
            raise ModelConfigError(f"parameter specialise: expected wait, background or off, got '{self.specialise}'")
        if self.ragged not in ("", "pad"):
            raise ModelConfigError(f"parameter ragged: expected pad, got '{self.ragged}'")
        if self.buckets and not self.ragged:
            raise ModelConfigError('parameter buckets: it needs the parameter ragged: "pad"')
        for name in _TRUTHS:
            if getattr(self, name) not in ("", "true", "false"):
                raise ModelConfigError(f"parameter {name}: expected true or false, got '{getattr(self, name)}'")
        for name, of, most in (("threads", "threads", MAX_THREADS), ("max_batch", "items", MAX_ITEMS),
                               ("state_capacity", "tokens", MAX_TOKENS)):
            value = getattr(self, name)
            if value and not (value.isascii() and value.isdecimal() and value.strip("0")):
                raise ModelConfigError(f"parameter {name}: expected a number of {of}, got '{value}'")
            if value and (len(value) > _DIGITS or int(value) > most):       # int() rejects very long strings
                raise ModelConfigError(f"parameter {name}: {value[:_DIGITS]} is more than the limit of {most}")


_OPTION_NAMES = tuple(option.name for option in fields(BuildOptions))
# Other servers' names of `threads`; 0 and less mean a default there, which is the server's --threads here.
_THREADS = ("intra_op_thread_count", "INFERENCE_NUM_THREADS", "TF_NUM_INTRA_THREADS")
_MISSPELT = 0.8                 # similarity from which an unknown key counts as misspelt
_PRECISION_MODES = {"FP32": "fp32", "FP16": "fp16", "INT8": "int8"}


def build_options(message: model_config.ModelConfig) -> tuple[BuildOptions, list[str]]:
    """Return the build options of a configuration, and notices about its other parameters.

    Raises
    ------
    ModelConfigError
        A value is not valid, or a key is misspelt.
    """
    parameters = {name: parameter.string_value for name, parameter in message.parameters.items()}
    options = {name: text for name, text in parameters.items() if name in _OPTION_NAMES}
    notices = []
    for name in sorted(parameters.keys() - options.keys()):
        text = parameters[name]
        if hint := nearest(name, _OPTION_NAMES, _MISSPELT):
            raise ModelConfigError(f"parameters: unknown key '{name}'; known are {', '.join(_OPTION_NAMES)}.{hint}")
        if name in _THREADS and "threads" not in parameters:
            if text.isascii() and text.isdecimal() and text.strip("0"):
                options["threads"] = text
            notices.append(f"parameters.{name}: taken as the parameter threads")
        else:
            notices.append(f"parameters.{name}: kept; it has no effect here")
    precision = _precision_mode(message)
    if precision and "precision" not in parameters:
        if precision != "int8" or "calib" in parameters or "calib_cache" in parameters:
            options["precision"] = precision
        else:
            notices.append("precision_mode INT8: built in fp32, because there is no calibration data; give "
                           'parameters { key: "calib" value { string_value: "FOLDER" } }')
    return BuildOptions(**options), notices


def _precision_mode(message: model_config.ModelConfig) -> str:
    """Return the precision for an execution accelerator's precision_mode; "" if there is none."""
    accelerators = message.optimization.execution_accelerators
    for accelerator in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        parameters: Mapping[str, str] = accelerator.parameters
        mode = parameters.get("precision_mode", "")
        if mode and mode not in _PRECISION_MODES:
            raise ModelConfigError(f"precision_mode: '{mode}' is none of {', '.join(_PRECISION_MODES)}")
        if mode:
            return _PRECISION_MODES[mode]
    return ""
