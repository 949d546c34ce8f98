"""Check the tensors of requests against the model: names, datatypes, shapes, batch size."""
from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.backend import Shapes
from infer_server.batching.request import Arrays, Outputs
from infer_server.config.config import ModelConfig, TensorSpec
from infer_server.config.pbtxt import nearest
from infer_server.engines.errors import InputError
from infer_server.errors import InvalidRequestError
from infer_server.protocol.codec import InputTensor, bracketed


@dataclass(frozen=True)
class Fit:
    """Result of a successful check: number of items, and compatibility with other requests."""
    items: int                              # items on the batch axis; 1 without one
    shape_key: Hashable                     # equal for requests that can share a batch
    decoded_bytes: int = 0                  # size of the tensors that are decoded from files


@dataclass(frozen=True)
class Items:
    """Rules for counting the items of a request."""
    leading: bool                           # True if the leading axis of every input counts items
    most: int                               # maximum number of items of a request
    axes: Mapping[str, int] = field(default_factory=dict)       # batch axis by input, if not the leading one

    def axis(self, name: str) -> int | None:
        """Return the batch axis of an input, or None."""
        return 0 if self.leading else self.axes.get(name)


_NONE: Arrays = MappingProxyType({})
ANY_ITEMS = 1 << 62                         # value of `most` if larger requests are split


class ModelSignature:
    """Inputs and outputs of a model, by name.

    Attributes
    ----------
    padded : callable
        Returns the shape of an input's item as it is executed: requests of equal shapes can share a batch.
    """

    def __init__(self, config: ModelConfig, items: Items, check: Callable[[Shapes], None] | None = None,
                 defaults: Arrays = _NONE) -> None:
        """Create a signature.

        Parameters
        ----------
        config : ModelConfig
            Completed configuration of the model.
        items : Items
            Rules for counting items.
        check : callable, optional
            Engine's check of input shapes; raises InputError.
        defaults : mapping of str to array
            Values of optional inputs that a request omits, in the model's shapes.
        """
        self._model = config.name
        self._inputs = {spec.name: spec for spec in config.inputs}
        self._required = {spec.name for spec in config.inputs if not spec.is_optional}
        self._outputs = {spec.name: spec for spec in config.outputs}
        self._batched = config.batched
        self._items = items
        self._reshapes = any(spec.reshape is not None for spec in (*config.inputs, *config.outputs))
        self._check, self._defaults = check, defaults
        self.padded: Callable[[str, tuple[int, ...]], tuple[int, ...]] = lambda name, item: item

    def fit(self, declared: Iterable[InputTensor]) -> Fit:
        """Check the inputs of a request.

        Raises
        ------
        InvalidRequestError
            An input is missing, unknown, or of another datatype or shape; the message says what is expected.
        """
        tensors = {tensor.name: tensor for tensor in declared}
        if tensors.keys() != self._inputs.keys() and not self._required <= tensors.keys() <= self._inputs.keys():
            raise self._wrong_names(tensors)
        shapes: list[tuple[int, ...]] = []
        items: int | None = None                # unknown until the first input with a batch axis
        for name, spec in self._inputs.items():
            tensor = tensors.get(name)
            if tensor is None:
                default = self._defaults.get(name)
                shapes.append(() if default is None or spec.reshape else (1, *default.shape[self._batched:]))
                continue
            if tensor.datatype != spec.datatype:
                raise InvalidRequestError(f"inference input '{name}' data-type is '{tensor.datatype.name}', but model "
                                          f"'{self._model}' expects '{spec.datatype.name}'")
            shape = tensor.shape
            item = shape[1:] if self._batched else shape
            if len(shape) < self._batched or not fits(item, spec.dims):
                raise self._wrong_shape(spec, shape)
            if (axis := self._items.axis(name)) is not None:
                own = self._model_shape(tensor)[axis]
                if items is not None and own != items:
                    raise InvalidRequestError(f"input '{name}' batch size does not match other inputs for "
                                              f"'{self._model}': it has {own}, and those before it {items}")
                items = own
            shapes.append(() if spec.is_ragged else (1, *self.padded(name, item)))
        items = 1 if items is None else items
        least = bool(self._batched or self._items.axes)         # only a request without a batch axis may be empty
        if not least <= items <= self._items.most:
            bound = f"<= {self._items.most}" if items else ">= 1"
            raise InvalidRequestError(
                f"inference request batch-size must be {bound} for '{self._model}', got {items}")
        if self._check:
            try:
                self._check({**{name: array.shape for name, array in self._left_out(tensors, items or 1)},
                             **{name: self._executed_shape(tensor, items) for name, tensor in tensors.items()}})
            except InputError as error:
                raise InvalidRequestError(str(error)) from error
        return Fit(items, tuple(shapes))

    def choose_outputs(self, requested: Iterable[str]) -> tuple[TensorSpec, ...]:
        """Return the outputs to send; all if none is requested.

        Raises
        ------
        InvalidRequestError
            A requested output is unknown or requested twice.
        """
        chosen: dict[str, TensorSpec] = {}
        for name in requested:
            if name not in self._outputs:
                raise InvalidRequestError(f"unexpected inference output '{name}' for model '{self._model}': it has "
                                          f"{self._describe(self._outputs)}.{nearest(name, self._outputs)}")
            if name in chosen:
                raise InvalidRequestError(f"output '{name}' already exists in request for model '{self._model}'")
            chosen[name] = self._outputs[name]
        return tuple((chosen or self._outputs).values())

    @property
    def is_identity(self) -> bool:
        """True if the tensors of a request are passed to the model unchanged."""
        return not (self._reshapes or self._defaults)

    def to_model(self, arrays: Arrays, items: int) -> Arrays:
        """Return the inputs of a checked request in the model's shapes, with defaults for omitted ones."""
        reshaped = self._reshaped(arrays) if self._reshapes else arrays
        return {**reshaped, **dict(self._left_out(reshaped, items))} if self._defaults else reshaped

    def _left_out(self, names: Collection[str], items: int) -> Iterator[tuple[str, NDArray[Any]]]:
        for name, array in self._defaults.items():
            if name not in names:
                yield name, array if (axis := self._items.axis(name)) is None else np.repeat(array, items, axis)

    def _reshaped(self, arrays: Arrays) -> Arrays:
        return {name: array if (spec := self._inputs[name]).reshape is None else array.reshape(
            (*array.shape[:self._batched], *spec.reshaped(array.shape[self._batched:])))
                for name, array in arrays.items()}

    def to_client(self, encode: Callable[[Arrays], Any]) -> Callable[[Arrays], Any]:
        """Wrap `encode` so that it gets the outputs in the shapes that clients see."""
        if not self._reshapes:
            return encode
        return lambda computed: encode(self._client_view(computed))

    def _client_view(self, computed: Arrays) -> Arrays:
        """Return the outputs in clients' shapes, without the states of sequences."""
        arrays = {name: self._restored(name, array) for name, array in computed.items() if name in self._outputs}
        return Outputs(arrays, computed.parameters) if isinstance(computed, Outputs) else arrays

    def _restored(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        spec, lead = self._outputs[name], array.shape[:self._batched]
        return array if spec.reshape is None else array.reshape((*lead, *spec.restored(array.shape[len(lead):])))

    def _model_shape(self, tensor: InputTensor) -> tuple[int, ...]:
        """Return the shape of an input in the model."""
        spec = self._inputs[tensor.name]
        return tensor.shape if spec.reshape is None else (
            *tensor.shape[:self._batched], *spec.reshaped(tensor.shape[self._batched:]))

    def _executed_shape(self, tensor: InputTensor, items: int) -> tuple[int, ...]:
        """Return the shape with which an input is executed; zero items become one item of zeros."""
        shape = self._model_shape(tensor)
        return shape if items else (1, *shape[1:])

    def _wrong_shape(self, spec: TensorSpec, shape: tuple[int, ...]) -> InvalidRequestError:
        if self._batched and not shape:
            return InvalidRequestError(f"input '{spec.name}' has no shape but model requires batch dimension for "
                                       f"'{self._model}': expected {bracketed(spec.full_shape(True))}")
        expected = spec.full_shape(self._batched)
        note = ", the batch dimension first" if self._batched and len(shape) != len(expected) else ""
        return InvalidRequestError(f"unexpected shape for input '{spec.name}' for model '{self._model}'. Expected "
                                   f"{bracketed(expected)}, got {bracketed(shape)}{note}")

    def _wrong_names(self, tensors: Mapping[str, InputTensor]) -> InvalidRequestError:
        """Build the error for a wrong number of inputs, the first unknown name, or all missing inputs."""
        unknown = [name for name in tensors if name not in self._inputs]
        missing = [name for name in self._inputs if name in self._required - tensors.keys()]
        least, most = len(self._required), len(self._inputs)
        problem = ""
        if not least <= len(tensors) <= most:
            expected = f"{most} inputs" if least == most else f"number of inputs between {least} and {most}"
            problem = (f"expected {expected} but got {len(tensors)} inputs for model '{self._model}'. Got input(s) "
                       f"{_named(tensors)}{', but ' if missing else '. '}")
        if missing and (problem or not unknown):
            problem += f"missing required input(s) {_named(missing)}. Please provide all required input(s). "
        if unknown:
            problem += f"unexpected inference input '{unknown[0]}' for model '{self._model}'. "
        hint = nearest(unknown[0], self._inputs) if unknown else ""
        return InvalidRequestError(f"{problem}Model '{self._model}' has {self._describe(self._inputs)}.{hint}")

    def _describe(self, specs: Mapping[str, TensorSpec]) -> str:
        return ", ".join(spec.describe(self._batched) for spec in specs.values())


def _named(names: Iterable[str]) -> str:
    return bracketed(f"'{name}'" for name in names)


def fits(item: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return item == dims or len(item) == len(dims) and all(
        extent == dim or dim == -1 for extent, dim in zip(item, dims, strict=True))
