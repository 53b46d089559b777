"""The demos of `flashsmith demo`: real models on flashsmith's kernels, with its public functions.

The wheel ships this folder as the package flashsmith_demos. A link in src/ makes it available in a
checkout too.
"""
