"""Print the best box of picture files: python client.py localhost:8001 FILE..."""
import sys
from pathlib import Path

import numpy as np

from infer_server import InferenceClient


def main(address: str, *paths: str) -> None:
    with InferenceClient(address) as client:
        for path in paths:
            file = np.array([[Path(path).read_bytes()]], np.object_)
            x, y, width, height, score = client.infer("detector", {"file": file})["predictions"][0]
            best = score.argmax()
            print(f"{path}: box {x[best]:.0f}, {y[best]:.0f}, {width[best]:.0f} x {height[best]:.0f}, "
                  f"score {score[best]:.2f}")
            if score[best] < 0.5:
                sys.exit("nothing was found")


if __name__ == "__main__":
    main(*sys.argv[1:])
