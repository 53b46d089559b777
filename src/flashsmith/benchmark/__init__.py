"""Runs `flashsmith run` and the commands that measure: builds kernels, proves them, counts their
instructions and, on a GPU, times them."""
