"""Trial runs: a model in float and quantised on calibration items, and the errors of the outputs."""
