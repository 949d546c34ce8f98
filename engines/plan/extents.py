"""Extents of tensors by name: what a feed's shapes say about the inputs that a plan declares.

    inputs x [batch, 3, H, W] and mask [batch, H]:    extents_of(...) -> {"batch": 2, "H": 320, "W": 480}

Where shapes or branches follow from the values of an input, as of a size or a sampling rate, that input is *deciding*,
and its values stand beside the extents: {"H": 320, "value of size": (640, 480)}.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engines.errors import ConfigError, InputError
from engines.ir.dtypes import BITS, as_in_memory, as_named
from engines.ir.graph import BATCH, Array
from engines.plan.plan import IoTensor

Shapes = Mapping[str, Sequence[int]]
Extents = Mapping[str, Any]                     # a number for each extent, a tuple of them for each deciding input
_OPTIONS = ("--min-shapes", "--opt-shapes", "--max-shapes")
Bounds = Mapping[str, tuple[int, int, int]]     # by extent: the least, the usual and the largest number


def open_extents(inputs: Sequence[IoTensor]) -> tuple[str, ...]:
    """The names of those that are open beside the batch, in the order of the inputs."""
    return tuple(dict.fromkeys(extent for io in inputs for extent in io.shape
                               if isinstance(extent, str) and extent != BATCH))


def extents_of(model: str, inputs: Sequence[IoTensor], shapes: Shapes) -> dict[str, int]:
    """The number of each open extent and of the batch, in tensors of these shapes.

    Raises InputError: an input that is missing or unknown, a shape that does not fit, two numbers for one extent.
    """
    taken = ", ".join(f"'{io.name}'" for io in inputs)
    if unknown := [name for name in shapes if name not in {io.name for io in inputs}]:
        raise InputError(f"{model} has no input '{unknown[0]}'; it has {taken}")
    if missing := [io.name for io in inputs if io.name not in shapes]:
        raise InputError(f"{model}: input '{missing[0]}' is missing; the model takes {taken}")
    found: dict[str, int] = {}
    source: dict[str, str] = {}
    for io in inputs:
        shape = shapes[io.name]
        if len(shape) != len(io.shape) or any(isinstance(wanted, int) and wanted != extent
                                              for wanted, extent in zip(io.shape, shape, strict=True)):
            raise InputError(f"{model}: input '{io.name}' has shape {list(shape)}, the model takes "
                             f"[{', '.join(map(str, io.shape))}]")
        for name, extent in zip(io.shape, shape, strict=True):
            if isinstance(name, str) and found.setdefault(name, extent) != extent:
                raise InputError(f"{model}: '{name}' is one extent, but input '{source[name]}' has {found[name]} there "
                                 f"and '{io.name}' has {extent}")
            if isinstance(name, str):
                source.setdefault(name, io.name)
    return found


def value_name(name: str) -> str:
    """What the values of a deciding input are called among the extents."""
    return f"value of {name}"


def value_of(array: Array, dtype: str) -> tuple[float, ...]:
    """The values of a deciding input of that type, in the order of memory."""
    flat = array.reshape(-1)
    if dtype in BITS:
        flat = as_named(as_in_memory(flat), dtype).astype(np.float32)
    return tuple((flat.astype(np.int64) if flat.dtype == np.bool_ else flat).tolist())


def extents_of_feed(model: str, inputs: Sequence[IoTensor], deciding: Sequence[str],
                    feed: Mapping[str, Array]) -> dict[str, Any]:
    """Those of its shapes, and the values of deciding inputs. Raises InputError as extents_of does."""
    found: dict[str, Any] = extents_of(model, inputs, {name: array.shape for name, array in feed.items()})
    return {**found, **{value_name(io.name): value_of(feed[io.name], io.dtype) for io in inputs if io.name in deciding}}


def bounds_of(model: str, inputs: Sequence[IoTensor], profile: Mapping[str, Sequence[Sequence[int]]]) -> Bounds:
    """The bounds that the least, usual and largest shapes of inputs make, of the batch, too.

    Inputs whose extents follow from others may be left out. Raises ConfigError: an extent without bounds, or three
    numbers that are not in order.
    """
    found: list[dict[str, int]] = []
    for which in range(3):
        given = [io for io in inputs if io.name in profile]
        try:
            found.append(extents_of(model, given, {name: tuple(shapes[which]) for name, shapes in profile.items()}))
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
    """Raises InputError: extents that lie outside of every profile; it names one, and its bounds."""
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
    """As people read them: H=320, W=480."""
    return ", ".join(f"{name}={extent[0] if isinstance(extent, tuple) and len(extent) == 1 else extent}"
                     for name, extent in extents.items())


def placeholder(inputs: Sequence[IoTensor]) -> str:
    """Return the option that gives shapes, with the names of open extents: --opt-shapes x:1x3xHEIGHTxWIDTH."""
    shapes = (f"{io.name}:{'x'.join(str(extent).upper() for extent in io.shape)}" for io in inputs)
    return f"--opt-shapes {','.join(shapes)}"
