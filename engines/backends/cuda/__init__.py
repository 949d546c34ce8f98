"""CUDA backend: compiles kernels, written with the IR builder of the CPU kernels, to PTX for NVIDIA GPUs."""
