"""Symbolic plans: functions from the extents of a model to its plan, and their encoding in files."""
