"""Compare sentences by the cosine of their embeddings.

    python client.py localhost:8001
"""
import sys
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from infer_server import InferenceClient

SENTENCES = ("the cat sat on the mat", "a cat sat on a mat", "prices of oil rose sharply in march")


def encoded(sentences: Sequence[str]) -> dict[str, np.ndarray]:
    """Return ids and mask, int64 [N, T], padded to the longest sentence. A word's id is a hash of it."""
    tokens = [[crc32(word.encode()) % 999 + 1 for word in sentence.split()] for sentence in sentences]
    longest = max(map(len, tokens))
    return {"ids": np.array([numbers + [0] * (longest - len(numbers)) for numbers in tokens]),
            "mask": np.array([[1] * len(numbers) + [0] * (longest - len(numbers)) for numbers in tokens])}


def main(address: str) -> None:
    with InferenceClient(address) as client:
        together = client.infer("encoder", encoded(SENTENCES))["embedding"]
        alone = np.concatenate([client.infer("encoder", encoded([sentence]))["embedding"] for sentence in SENTENCES])
    near, far = (float(together[0] @ together[other]) for other in (1, 2))
    print(f"{SENTENCES[0]} | {SENTENCES[1]}: {near:.2f}\n{SENTENCES[0]} | {SENTENCES[2]}: {far:.2f}")
    if near < far + 0.3 or np.abs(together - alone).max() > 1e-3:
        sys.exit("similar sentences are not near each other, or padding changes an embedding")


if __name__ == "__main__":
    main(*sys.argv[1:])
