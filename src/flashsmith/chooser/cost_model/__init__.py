"""The cost model: the expected time of a kernel, computed from its config and the figures of a GPU.

When there are no measurements, the estimates rank the configs. They also scale measured times to
other sizes. They are not exact: a time may be wrong by a quarter, or by more if the figures of a
GPU come from a data sheet.
"""

from flashsmith.chooser.cost_model.estimate import Estimate, estimate

__all__ = ["Estimate", "estimate"]
