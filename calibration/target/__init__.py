"""Builds to an accuracy target: layers move from INT8 to float until a metric drops no more than allowed."""
