"""The tensors that pass between the steps of an ensemble: by name, with or without a batch axis, and their sizes."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from infer_server.batching.cache import bytes_of
from infer_server.batching.request import Arrays, Outputs, parameters_of
from infer_server.config.config import ModelConfig, TensorSpec
from infer_server.config.signature import fits
from infer_server.config.steps import Step
from infer_server.protocol.parameters import Parameters


class Tensors:
    """Tensors that are available, by the ensemble's names, with the parameters of the responses they came in."""

    def __init__(self, arrays: dict[str, NDArray[Any]], absent: set[str], batched: dict[str, bool]) -> None:
        """absent: those that there will not be. batched: whether each of the arrays has a batch axis."""
        self._arrays, self._absent, self._batched = arrays, absent, batched
        self._makers: dict[str, int] = {}               # the step that made each
        self._said: dict[int, Parameters] = {}          # by the steps

    def has(self, names: Iterable[str]) -> bool:
        """True if no more tensors will come."""
        return self._arrays.keys() | self._absent >= set(names)

    def add(self, number: int, step: Step, outputs: Arrays, batched: bool) -> None:
        """A step's response. batched: its model has a batch axis."""
        for name, tensor in step.outputs.items():
            if name in outputs:
                self._arrays[tensor], self._makers[tensor], self._batched[tensor] = outputs[name], number, batched
            else:
                self._absent.add(tensor)
        if parameters := parameters_of(outputs):
            self._said[number] = parameters

    def added(self, number: int, step: Step, outputs: Arrays, batched: bool) -> Tensors:
        """Others, with those of a response."""
        others = Tensors(dict(self._arrays), set(self._absent), dict(self._batched))
        others._makers, others._said = dict(self._makers), dict(self._said)
        others.add(number, step, outputs, batched)
        return others

    def read(self, names: Mapping[str, str], specs: Sequence[TensorSpec], batched: bool) -> dict[str, NDArray[Any]]:
        """Return the available tensors by their reader's names, with a batch axis if it has one."""
        return {name: self._arrays[tensor] if self._batched[tensor] == batched
                else _with_batch(self._arrays[tensor], batched,
                                 next((spec.dims for spec in specs if spec.name == name), ()))     # it may have none
                for name, tensor in names.items() if tensor in self._arrays}

    def said_with(self, names: Iterable[str]) -> Parameters:
        """The parameters that came with these; of steps that differ, the last one's."""
        makers = {self._makers[name] for name in names if name in self._makers}
        return _merged({number: said for number, said in self._said.items() if number in makers})

    def outputs(self, config: ModelConfig, asked: Sequence[str]) -> Arrays:
        """The ensemble's."""
        specs = [spec.in_model for spec in config.outputs]
        arrays = self.read({name: name for name in asked}, specs, config.batched)
        left_out = not self._absent.isdisjoint(asked)
        return Outputs(arrays, _merged(self._said)) if self._said or left_out else arrays


def size_of(outputs: Arrays) -> int:
    """Return the bytes of the tensors of a response."""
    return sum(map(bytes_of, outputs.values()))


def _with_batch(array: NDArray[Any], batched: bool, dims: tuple[int, ...]) -> NDArray[Any]:
    """A tensor as its reader has it, where only one of its maker and its reader has a batch axis, as in Triton.

    A whole tensor that fits is one item of a batch; one that has an axis more is a batch already. A batch that fits is
    a whole tensor; else one of a single item is that item. What does not fit then is refused by the reader.
    """
    if fits(array.shape, dims):
        return array[None] if batched else array
    return array[0] if not batched and array.shape[:1] == (1,) else array


def _merged(said: Mapping[int, Parameters]) -> Parameters:
    return {name: value for number in sorted(said) for name, value in said[number].items()}
