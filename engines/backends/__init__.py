"""Targets: a folder each. A backend lowers a graph with stored types decided to the machine's part of a plan."""
