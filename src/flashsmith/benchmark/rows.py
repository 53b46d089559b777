"""The reader of measurements, under the name that the docs have had for it."""

from flashsmith.benchmark.measurement_files import read_rows

__all__ = ["read_rows"]
