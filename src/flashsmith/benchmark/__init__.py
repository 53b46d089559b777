"""The main job for a set of kernels: builds and runs them, proves them, counts instructions and, on
a GPU, times the kernels."""
