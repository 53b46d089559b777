"""The report: result files become one self-contained HTML page, and its charts as PNG files.

`inputs` reads, `cells`, `space` and `placing` sort what belongs together, `pictures` draws,
`overview`, `comparison`, `kernels` and `page` write. The page fetches nothing and is whole
without its script.
"""

from __future__ import annotations

from flashsmith.benchmark.report.inputs import read_results, with_stored_rooflines
from flashsmith.benchmark.report.page import make_page, write_page
from flashsmith.benchmark.report.results import PASSED_OVER

__all__ = ["PASSED_OVER", "make_page", "read_results", "with_stored_rooflines", "write_page"]
