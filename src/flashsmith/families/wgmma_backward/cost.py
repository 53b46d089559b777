"""What compiling a config of the wgmma_backward family costs."""

# Relative compile time of a config: five kernels, in whose loops an instruction is a warpgroup's
# product.
COMPILE_COST = 1500.0
