"""The documented old location of ``read_rows``, the reader of measurement files."""

from flashsmith.benchmark.measurement_files import read_rows

__all__ = ["read_rows"]
