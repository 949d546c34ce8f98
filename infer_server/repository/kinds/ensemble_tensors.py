"""Tensors that pass between the steps of an ensemble: names, batch axes, sizes."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from infer_server.batching.cache import bytes_of
from infer_server.batching.request import Arrays, Outputs, parameters_of
from infer_server.config.config import ModelConfig, TensorSpec
from infer_server.config.signature import fits
from infer_server.config.steps import EnsembleStep
from infer_server.protocol.parameters import Parameters


class Tensors:
    """Available tensors by the ensemble's names, with the parameters of the responses that contained them."""

    def __init__(self, arrays: dict[str, NDArray[Any]], absent: set[str], batched: dict[str, bool]) -> None:
        """Begin with arrays by name. absent: names without a value. batched: True for arrays with a batch axis."""
        self._arrays, self._absent, self._batched = arrays, absent, batched
        self._makers: dict[str, int] = {}               # index of the step that made each tensor
        self._parameters: dict[int, Parameters] = {}    # response parameters by step

    def has(self, names: Iterable[str]) -> bool:
        """Return True if each tensor is available or known to be absent."""
        return self._arrays.keys() | self._absent >= set(names)

    def add(self, number: int, step: EnsembleStep, outputs: Arrays, batched: bool) -> None:
        """Add the outputs of a step's response; `batched` is True if its model has a batch axis."""
        for name, tensor in step.outputs.items():
            if name in outputs:
                self._arrays[tensor], self._makers[tensor], self._batched[tensor] = outputs[name], number, batched
            else:
                self._absent.add(tensor)
        if parameters := parameters_of(outputs):
            self._parameters[number] = parameters

    def added(self, number: int, step: EnsembleStep, outputs: Arrays, batched: bool) -> Tensors:
        """Return a copy with the outputs of a response added."""
        others = Tensors(dict(self._arrays), set(self._absent), dict(self._batched))
        others._makers, others._parameters = dict(self._makers), dict(self._parameters)
        others.add(number, step, outputs, batched)
        return others

    def read(self, names: Mapping[str, str], specs: Sequence[TensorSpec], batched: bool) -> dict[str, NDArray[Any]]:
        """Return the available tensors by the consumer's names, with a batch axis if `batched`."""
        return {name: self._arrays[tensor] if self._batched[tensor] == batched
                else _with_batch(self._arrays[tensor], batched,
                                 next((spec.dims for spec in specs if spec.name == name), ()))     # () if unknown
                for name, tensor in names.items() if tensor in self._arrays}

    def parameters_with(self, names: Iterable[str]) -> Parameters:
        """Return the parameters of the responses that contained these tensors; the last step's take precedence."""
        makers = {self._makers[name] for name in names if name in self._makers}
        return _merged({number: each for number, each in self._parameters.items() if number in makers})

    def outputs(self, config: ModelConfig, requested: Sequence[str]) -> Arrays:
        """Return the requested outputs of the ensemble."""
        specs = [spec.in_model for spec in config.outputs]
        arrays = self.read({name: name for name in requested}, specs, config.batched)
        left_out = not self._absent.isdisjoint(requested)
        return Outputs(arrays, _merged(self._parameters)) if self._parameters or left_out else arrays


def size_of(outputs: Arrays) -> int:
    """Return the size of a response's tensors in bytes."""
    return sum(map(bytes_of, outputs.values()))


def _with_batch(array: NDArray[Any], batched: bool, dims: tuple[int, ...]) -> NDArray[Any]:
    """Add or remove the batch axis of a tensor whose producer has one and whose consumer has none, or vice versa.

    As in Triton, a tensor without a batch axis that fits `dims` becomes a batch of one item; one with an axis more is
    taken as a batch. A batch that fits `dims` is passed whole, else a batch of one item becomes that item. The consumer
    rejects any other shape.
    """
    if fits(array.shape, dims):
        return array[None] if batched else array
    return array[0] if not batched and array.shape[:1] == (1,) else array


def _merged(parameters: Mapping[int, Parameters]) -> Parameters:
    return {name: value for number in sorted(parameters) for name, value in parameters[number].items()}
