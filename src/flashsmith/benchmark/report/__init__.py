"""The report: result files become one self-contained HTML page, and its charts as SVG files.

`result_files` reads; `comparison`, `config_space` and `roofline_points` sort what belongs together;
`svg_charts` draws; `page` fills the templates. The page fetches nothing, and all of it can be read
without its script.
"""

from __future__ import annotations

from flashsmith.benchmark.report.page import make_page, write_page
from flashsmith.benchmark.report.result_files import read_results, with_stored_rooflines
from flashsmith.benchmark.report.results import PASSED_OVER

__all__ = ["PASSED_OVER", "make_page", "read_results", "with_stored_rooflines", "write_page"]
