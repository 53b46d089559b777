"""The old location of ``read_rows``, kept because it was documented."""

from flashsmith.benchmark.measurement_files import read_rows

__all__ = ["read_rows"]
