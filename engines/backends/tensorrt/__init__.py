"""TensorRT backend: NVIDIA's library builds an engine from the fused and quantised graph, kept in our plan file."""
