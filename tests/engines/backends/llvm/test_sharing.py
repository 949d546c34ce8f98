"""Constants that a plan finds in another one of the same model: by their values, and how they are turned."""
import numpy as np

from engines.backends.llvm import sharing


def test_a_square_weight_is_not_taken_for_its_transpose() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    digests = {sharing._digest({"w": array}) for array in (weight, weight.T, weight[::-1], weight[:, ::-1])}
    assert len(digests) == 4
    assert sharing._digest({"w": weight.T}) == sharing._digest({"w": weight.copy().T})
