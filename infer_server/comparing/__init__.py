"""Comparison of two plans or models: errors of each output and of each layer."""
