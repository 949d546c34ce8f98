"""Sources of calibration items, one module each."""
