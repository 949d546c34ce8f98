"""A network small enough to be quantised in numpy."""
import numpy as np

from infer_server.calibration.accuracy.comparison import compare
from infer_server.calibration.histogram import Histogram
from infer_server.calibration.table import make_table

CALIBRATORS = ("entropy", "percentile", "minmax", "mse")


class TwoLayers:
    """y = relu(relu(x A) B), its hidden tensors and input storable in a byte: small enough to quantise here."""

    def __init__(self, outlier=0.0):
        rng = np.random.default_rng(0)
        self.a, self.b = rng.standard_normal((32, 64)) / 6, rng.standard_normal((64, 10)) / 8
        self.items = rng.standard_normal((48, 32))
        self.items[0, 0] = outlier or self.items[0, 0]

    def run(self, ranges=None):
        def stored(name, x):
            if ranges is None:
                return x
            low, high = ranges[name]
            scale = (high - low) / 255
            zero_point = np.rint(-low / scale)
            return (np.clip(np.rint(x / scale) + zero_point, 0, 255) - zero_point) * scale

        x = stored("x", self.items)
        hidden = stored("hidden", np.maximum(x @ self.a, 0))
        return {"x": self.items, "hidden": hidden, "y": np.maximum(hidden @ self.b, 0)}

    def tables(self):
        return {name: make_table(name, "", len(self.items), self.histograms()) for name in CALIBRATORS}

    def histograms(self):
        histograms = {}
        for name, values in self.run().items():
            histograms[name] = Histogram()
            histograms[name].observe(values)
        return histograms

    def evaluate(self, table):
        return compare([{"y": self.run()["y"]}], [{"y": self.run(table.ranges)["y"]}])
