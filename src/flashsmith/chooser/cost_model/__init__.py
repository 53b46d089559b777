"""The expected time of a kernel on a GPU, from its config and the GPU's figures alone.

The estimates rank configs if nothing was measured, and scale measured times to other sizes. They
are not exact: a time in milliseconds may be off by a quarter, or by more if a GPU's rates are from
a data sheet.
"""

from flashsmith.chooser.cost_model.estimate import Estimate, estimate

__all__ = ["Estimate", "estimate"]
