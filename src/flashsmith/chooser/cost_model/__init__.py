"""What a kernel should take on a GPU, from its config and the GPU's figures alone.

Good for ranking where nothing was measured, and for carrying measured times over to other sizes.
Not for promises: a time in milliseconds may be a quarter off, and more where a GPU's rates are
those of a data sheet.
"""

from flashsmith.chooser.cost_model.estimate import Estimate, estimate

__all__ = ["Estimate", "estimate"]
