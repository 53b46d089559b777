"""What `flashsmith demo` runs: real models on flashsmith's kernels, with its public functions.

The wheel ships this folder as the package flashsmith_demos; src/ has a link to it, so that a
checkout has it, too.
"""
