"""TensorRT, where it is installed: our fused and quantised graph, built by NVIDIA's compiler, in our own plan file."""
