"""The main job over a set of kernels: build, run, prove, count instructions and, on a GPU, time
them."""
