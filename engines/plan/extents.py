"""Named extents of a plan's inputs, and the numbers that the shapes of a feed give them.

    inputs x [batch, 3, H, W] and mask [batch, H]:    extents_of(...) -> {"batch": 2, "H": 320, "W": 480}

An input whose values decide about shapes or branches, such as a size or a sampling rate, is *deciding*. Its values are
listed with the extents: {"H": 320, "value of size": (640, 480)}.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.engines.errors import ConfigError, InputError
from infer_server.engines.ir.dtypes import BITS, as_in_memory, as_named
from infer_server.engines.ir.graph import BATCH, Array
from infer_server.engines.plan.plan import IoTensor

Shapes = Mapping[str, Sequence[int]]
Extents = Mapping[str, Any]                     # an int for each extent, a tuple of numbers for each deciding input
CACHES = "caches"               # key of Plan.metadata: inputs that may grow in place, as passes/caches.py finds them
CACHE_CAPACITY = "cache capacity"       # the extent of such inputs: the number of tokens that they have room for
_OPTIONS = ("--min-shapes", "--opt-shapes", "--max-shapes")
Bounds = Mapping[str, tuple[int, int, int]]     # extent -> (min, opt, max)


def open_extents(inputs: Sequence[IoTensor]) -> tuple[str, ...]:
    """Return the names of the open extents, batch excluded, in the order of the inputs."""
    return tuple(dict.fromkeys(extent for io in inputs for extent in io.shape
                               if isinstance(extent, str) and extent != BATCH))


def extents_of(model: str, inputs: Sequence[IoTensor], shapes: Shapes) -> dict[str, int]:
    """Return the number of each open extent and of the batch in tensors of these shapes.

    Parameters
    ----------
    model : str
        Name of the model, for messages.
    inputs : sequence of IoTensor
        Declared inputs.
    shapes : mapping of str to sequence of int
        Shape of each input by name.

    Raises
    ------
    InputError
        An input is missing or unknown, a shape does not fit, or an extent has two numbers.
    """
    names = [io.name for io in inputs]
    if shapes.keys() != {*names}:
        taken = ", ".join(f"'{name}'" for name in names)
        if unknown := [name for name in shapes if name not in names]:
            raise InputError(f"{model} has no input '{unknown[0]}'; it has {taken}")
        missing = next(name for name in names if name not in shapes)
        raise InputError(f"{model}: input '{missing}' is missing; the model takes {taken}")
    found: dict[str, int] = {}
    for io in inputs:
        shape = shapes[io.name]
        pairs = [*zip(io.shape, shape, strict=False)]
        open_ = [pair for pair in pairs if pair[0] != pair[1]]
        if len(shape) != len(io.shape) or any([isinstance(declared, int) for declared, _ in open_]):
            raise InputError(f"{model}: input '{io.name}' has shape {list(shape)}, the model takes "
                             f"[{', '.join(map(str, io.shape))}]")
        for name, extent in open_:
            if (before := found.setdefault(str(name), extent)) != extent:
                first = next(one.name for one in inputs if name in one.shape)
                raise InputError(f"{model}: '{name}' is one extent, but input '{first}' has {before} there and "
                                 f"'{io.name}' has {extent}")
    return found


def value_name(name: str) -> str:
    """Return the key of a deciding input's values among the extents."""
    return f"value of {name}"


def value_of(array: Array, dtype: str) -> tuple[float, ...]:
    """Return the values of a deciding input of this dtype in row-major order; bool as 0 and 1."""
    flat = array.reshape(-1)
    if dtype in BITS:
        flat = as_named(as_in_memory(flat), dtype).astype(np.float32)
    return tuple((flat.astype(np.int64) if flat.dtype == np.bool_ else flat).tolist())


def extents_of_feed(model: str, inputs: Sequence[IoTensor], deciding: Sequence[str],
                    feed: Mapping[str, Array]) -> dict[str, Any]:
    """Return the extents of a feed's shapes and the values of deciding inputs. Raises InputError as extents_of."""
    found: dict[str, Any] = extents_of(model, inputs, {name: array.shape for name, array in feed.items()})
    return {**found, **{value_name(io.name): value_of(feed[io.name], io.dtype) for io in inputs if io.name in deciding}}


def bounds_of(model: str, inputs: Sequence[IoTensor], profile: Mapping[str, Sequence[Sequence[int]]]) -> Bounds:
    """Return the bounds of each extent, batch included, from an optimisation profile.

    Parameters
    ----------
    model : str
        Name of the model, for messages.
    inputs : sequence of IoTensor
        Declared inputs.
    profile : mapping of str to sequence of shapes
        (min, opt, max) shapes of each input; inputs whose extents occur in others may be left out.

    Raises
    ------
    ConfigError
        An extent has no bounds, or its three numbers are not in order.
    """
    found: list[dict[str, int]] = []
    for which in range(3):
        profiled = [io for io in inputs if io.name in profile]
        try:
            found.append(extents_of(model, profiled, {name: tuple(shapes[which]) for name, shapes in profile.items()}))
        except InputError as error:
            raise ConfigError(f"{_OPTIONS[which]}: {error}") from error
    for io in inputs:
        if missing := [extent for extent in io.shape if isinstance(extent, str) and extent not in found[0]]:
            raise ConfigError(f"{model}: the profile does not say what '{missing[0]}' of input '{io.name}' "
                              f"[{', '.join(map(str, io.shape))}] is; give its shape to {', '.join(_OPTIONS)}")
    bounds = {name: (found[0][name], found[1][name], found[2][name]) for name in found[0]}
    for name, (least, usual, most) in bounds.items():
        if not least <= usual <= most:
            raise ConfigError(f"{model}: the profile makes '{name}' {least} at least, {usual} usually and {most} at "
                              "most; these must be in order")
    return bounds


def check_bounds(model: str, profiles: Sequence[Bounds], extents: Extents) -> None:
    """Raise InputError, naming an extent and its bounds, if the extents are outside every profile."""
    outside = ""
    for bounds in profiles:
        wrong = [name for name, (least, _, most) in bounds.items() if not least <= extents.get(name, least) <= most]
        if not wrong:
            return
        least, _, most = bounds[wrong[0]]
        outside = outside or (f"{model}: '{wrong[0]}' is {extents[wrong[0]]}, and the plan was built for "
                              f"{least} to {most}")
    if outside:
        more = f" (and {len(profiles) - 1} profiles more, none of which fits either)" if len(profiles) > 1 else ""
        raise InputError(outside + more)


def text(extents: Extents) -> str:
    """Return the extents as text: H=320, W=480."""
    return ", ".join(f"{name}={extent[0] if isinstance(extent, tuple) and len(extent) == 1 else extent}"
                     for name, extent in extents.items())


def placeholder(inputs: Sequence[IoTensor]) -> str:
    """Return an --opt-shapes option with the names of open extents: --opt-shapes x:1x3xHEIGHTxWIDTH."""
    shapes = (f"{io.name}:{'x'.join(str(extent).upper() for extent in io.shape)}" for io in inputs)
    return f"--opt-shapes {','.join(shapes)}"
