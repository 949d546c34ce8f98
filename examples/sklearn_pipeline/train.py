"""Train a pipeline and export it as pipeline.onnx.

    python train.py

Needs scikit-learn and skl2onnx.
"""
from pathlib import Path

from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def main() -> None:
    rows, classes = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), RandomForestClassifier(50, max_depth=4, random_state=0))
    pipeline.fit(rows, classes)
    model = to_onnx(pipeline, initial_types=[("rows", FloatTensorType([None, 4]))], options={"zipmap": False},
                    target_opset={"": 17, "ai.onnx.ml": 3})
    Path(__file__).with_name("pipeline.onnx").write_bytes(model.SerializeToString())


if __name__ == "__main__":
    main()
