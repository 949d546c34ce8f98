"""Classify flowers.

    python client.py localhost:8001
"""
import sys

import numpy as np

from infer_server import InferenceClient

CLASSES = ("setosa", "versicolor", "virginica")
ROWS = np.float32([[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]])


def main(address: str) -> None:
    with InferenceClient(address) as client:
        answer = client.infer("iris", {"rows": ROWS})
    for row, label, shares in zip(ROWS, answer["label"], answer["probabilities"], strict=True):
        print(f"{row}: {CLASSES[label]} ({shares[label]:.2f})")
    if answer["label"].tolist() != [0, 2]:
        sys.exit("a class is wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
