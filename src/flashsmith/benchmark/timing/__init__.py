"""The one timing protocol: what is launched in which order, between which events, on what clock.

CUDA events on the stream that the kernels run on; warm-up; the L2 overwritten between repeats;
contenders in turn, or one after the other. All that is timed in flashsmith is timed here.
"""

from flashsmith.benchmark.timing.clock import Clock
from flashsmith.benchmark.timing.cuda_events import CudaEvents
from flashsmith.benchmark.timing.environment import Environment
from flashsmith.benchmark.timing.measure import Contender, measure
from flashsmith.benchmark.timing.protocol import INTERLEAVED, ONE_BY_ONE, Protocol
from flashsmith.benchmark.timing.samples import Samples
from flashsmith.benchmark.timing.telemetry import Telemetry

__all__ = [
    "INTERLEAVED",
    "ONE_BY_ONE",
    "Clock",
    "Contender",
    "CudaEvents",
    "Environment",
    "Protocol",
    "Samples",
    "Telemetry",
    "measure",
]
