"""Reduction of a failing ONNX model to the smallest part that still fails a check."""
