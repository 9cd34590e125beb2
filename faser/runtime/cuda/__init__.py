"""The CUDA device: kernels over static buffers, so that a whole step can be captured in graphs."""
