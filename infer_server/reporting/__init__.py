"""Report of a plan as one self-contained HTML page: the build's decisions, accuracy, kernels and their times."""
