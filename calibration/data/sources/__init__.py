"""Where calibration items come from: a file each."""
