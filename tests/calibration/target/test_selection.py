"""Layers move to float by noise removed per microsecond lost, until a target is met or the time is up."""
import math

import pytest

from infer_server.calibration.target.path import PrecisionPath
from infer_server.calibration.target.selection import Selection
from infer_server.calibration.target.sets import Layer, Mix


class Network:
    """A chain of layers, each of which takes 1 us more in bf16 and `fp32_us` more in fp32; a conversion takes 3 us."""

    def __init__(self, int8, bf16=None, conversion_us=0.0, fp32_us=1.0, int8_us=100.0):
        """int8, bf16: noise of each layer, by name. No bf16: layers move to fp32 alone. int8_us: 0 without timing."""
        self.layers = [Layer(name, (name,)) for name in int8]
        self.bf16 = bf16 or dict.fromkeys(int8, 0.0)
        self.noises = {"int8": self._by_layer(int8), **({"bf16": self._by_layer(self.bf16)} if bf16 else {}),
                       "fp32": {}}
        self.int8, self.conversion_us, self.fp32_us, self.int8_us = int8, conversion_us, fp32_us, int8_us
        self.dropped = {}       # drops of mixes, by name, that chance makes other than their noise

    def _by_layer(self, noise):
        return {layer: noise[layer.name] for layer in self.layers}

    def precision(self, mix, layer):
        return "int8" if layer not in mix.kept else "fp32" if layer in mix.fp32 else "bf16"

    def drop(self, mix):
        if (name := self.name(mix)) in self.dropped:
            return self.dropped[name]
        return sum({"int8": self.int8, "bf16": self.bf16}.get(self.precision(mix, layer), {}).get(layer.name, 0.0)
                   for layer in self.layers)

    def us(self, mix):
        if not self.int8_us:
            return 0.0
        taken = [self.precision(mix, layer) for layer in self.layers]
        conversions = sum((a == "int8") != (b == "int8") for a, b in zip(taken, taken[1:], strict=False))
        floats = taken.count("bf16") + self.fp32_us * taken.count("fp32")
        return self.int8_us + floats + self.conversion_us * conversions

    def name(self, mix):
        """Return the layers of a mix: capital letters for those in fp32 beside bf16."""
        return "".join(layer.name.upper() if "bf16" in self.noises and layer in mix.fp32 else layer.name
                       for layer in self.layers if layer in mix.kept)

    def path(self, most_us=math.inf):
        return PrecisionPath(self, self.noises, {}, most_us, lambda *step: None)

    def chosen(self, most_drop, most_us=math.inf):
        return self.name(Selection(self, self.path(most_us), most_drop, lambda *step: None).chosen())


@pytest.mark.parametrize(("most_drop", "expected"), [(0.75, "b"), (0.55, "ab"), (0.12, "abd"), (0.0, "abcd")])
def test_the_fewest_layers_move_that_meet_the_target(most_drop, expected):
    assert Network({"a": 0.3, "b": 0.4, "c": 0.1, "d": 0.2}).chosen(most_drop) == expected


def test_without_timing_all_layers_take_as_long():
    assert Network({"a": 0.3, "b": 0.4, "c": 0.1, "d": 0.2}, int8_us=0.0).chosen(0.55) == "ab"


@pytest.mark.parametrize(("noises", "most_drop", "expected"), [
    ({"a": 0.5, "b": 0.0, "c": 0.4, "d": 0.0}, 0.15, "abc"),            # an INT8 layer between two float ones
    ({"a": 0.5, "b": 0.0, "c": 0.0, "d": 0.4, "e": 0.0}, 0.15, "abcd"),     # two of them
    ({"a": 0.5, "b": 0.0, "c": 0.0, "d": 0.0, "e": 0.0, "f": 0.0, "g": 0.0, "h": 0.4}, 0.15, "ah"),     # too many
    ({"a": 0.3, "b": 0.27, "c": 0.0, "d": 0.0, "e": 0.0, "f": 0.0, "g": 0.28}, 0.45, "ab")])    # a run, no conversion
def test_layers_that_save_conversions_move_together(noises, most_drop, expected):
    assert Network(noises, conversion_us=3.0).chosen(most_drop) == expected


def test_a_layer_that_the_target_does_not_need_returns_to_int8():
    """Chance lets `ab` meet a target that `b` alone meets, too: it is quieter than the limit of pruning allows."""
    network = Network({"a": 0.02, "b": 0.5, "c": 0.4})
    network.dropped = {"b": 0.45, "bc": 0.05}
    assert network.chosen(0.1) == "bc"
    network = Network({"a": 0.5, "b": 0.1, "c": 0.4})
    network.dropped = {"a": 0.9, "ac": 0.9, "c": 0.0}
    assert network.chosen(0.05) == "abc"        # `c` alone meets the target by chance, and is much noisier


@pytest.mark.parametrize(("bf16", "most_drop", "expected"), [
    ({"a": 0.01, "b": 0.01, "c": 0.01}, 0.15, "ab"),        # bf16 suffices
    ({"a": 0.2, "b": 0.01, "c": 0.01}, 0.15, "Ab"),         # one layer needs fp32
    ({"a": 0.01, "b": 0.01, "c": 0.01}, 0.005, "ABC")])     # all do
def test_layers_move_to_float32_if_a_faster_precision_does_not_suffice(bf16, most_drop, expected):
    assert Network({"a": 0.5, "b": 0.3, "c": 0.05}, bf16, fp32_us=5.0).chosen(most_drop) == expected


def test_no_mix_takes_longer_than_the_limit():
    network = Network({"a": 0.5, "b": 0.3, "c": 0.1, "d": 0.1}, conversion_us=3.0)
    free, limited = network.path(), network.path(105.0)
    assert network.name(free.last()) == "abcd" and network.name(limited.last()) == "ab"
    assert network.us(limited.last()) == 105.0
    assert network.chosen(0.05, 105.0) == "ab"          # misses the target: the quietest within the time
    assert network.chosen(0.55, 105.0) == "a"


def test_the_noise_of_a_mix_is_the_sum_of_its_layers():
    network = Network({"a": 0.5, "b": 0.3, "c": 0.1}, {"a": 0.02, "b": 0.01, "c": 0.0}, fp32_us=5.0)
    path, (a, b, _) = network.path(), network.layers
    assert path.noise(Mix()) == pytest.approx(0.9)
    assert path.noise(Mix().moved(a, "bf16").moved(b, "fp32")) == pytest.approx(0.02 + 0.1)
    assert path.noise(Mix().moved(a, "fp32").moved(a, "int8")) == pytest.approx(0.9)
    assert path.upto(0) == Mix() and path.has(6) and not path.has(7)
