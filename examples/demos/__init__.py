"""The demos of `flashsmith demo`: real models that run on flashsmith's kernels through its public
functions.

The wheel ships this folder as the package flashsmith_demos. A link in src/ makes it available in a
checkout too.
"""
