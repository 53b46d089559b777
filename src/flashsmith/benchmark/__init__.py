"""Runs `flashsmith run` and the measuring commands: builds kernels, checks their results, counts
their instructions and, on a GPU, times them."""
