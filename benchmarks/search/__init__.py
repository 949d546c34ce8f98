"""Constants of the calibration search, each chosen again without one of the models."""
