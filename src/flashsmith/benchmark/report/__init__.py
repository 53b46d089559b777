"""The report: makes a self-contained HTML page from result files, and SVG files of its charts.

`result_files` reads the files. `comparison`, `config_space` and `roofline_points` group the
results, `svg_charts` draws them, and `page` fills the templates. The page loads nothing from
elsewhere, and all its content can be read without the script.
"""

from __future__ import annotations

from flashsmith.benchmark.report.page import make_page, write_page
from flashsmith.benchmark.report.result_files import read_results, with_stored_rooflines
from flashsmith.benchmark.report.results import PASSED_OVER

__all__ = ["PASSED_OVER", "make_page", "read_results", "with_stored_rooflines", "write_page"]
