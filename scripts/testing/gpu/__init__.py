"""Emulated GPU below the CUDA runtime, and a few problems of every family of its kernels."""
