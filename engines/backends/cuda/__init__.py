"""The CUDA backend: NVIDIA GPUs, by PTX that LLVM makes of kernels written as those of the CPU are."""
