# letterbox.py
import os
from pathlib import Path

import numpy as np
from PIL import Image


def letterbox(picture: Image.Image, size: int = 64) -> np.ndarray:
    """Resize to fit, pad with gray to a square, scale to 0..1: float32 [1, 3, size, size]."""
    picture = picture.convert("RGB")
    scale = size / max(picture.size)
    resized = picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))))
    canvas = Image.new("RGB", (size, size), (114, 114, 114))
    canvas.paste(resized, ((size - resized.width) // 2, (size - resized.height) // 2))
    return np.ascontiguousarray(np.asarray(canvas, np.float32).transpose(2, 0, 1)[None] / 255)


def feeds():
    """Calibration data: one feed per picture of the folder $PICTURES."""
    for path in sorted(Path(os.environ.get("PICTURES", "calibration")).glob("*.png")):
        yield {"images": letterbox(Image.open(path))}
