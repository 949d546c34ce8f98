"""Classify a folder of LABEL-*.png pictures.

    python client.py localhost:8001 FOLDER
"""
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from infer_server import InferenceClient


def main(address: str, folder: str) -> None:
    paths = sorted(Path(folder).glob("*.png"))
    with InferenceClient(address) as client:
        def digit(path: Path) -> int:
            pixels = np.asarray(Image.open(path).convert("L"))[None, :, :, None]        # uint8 [1, 28, 28, 1]
            return int(client.infer("digits", {"image": pixels})["logits"].argmax())

        with ThreadPoolExecutor(8) as pool:
            predicted = pool.map(digit, paths)
            right = sum(label == int(path.name[0]) for label, path in zip(predicted, paths, strict=True))
    print(f"{len(paths)} pictures, {right / len(paths):.1%} right")
    if right < 0.97 * len(paths):
        sys.exit("fewer than 97 % are right: is the preprocessing the model's?")


if __name__ == "__main__":
    main(*sys.argv[1:])
