"""Runs the `flashsmith` command in the test's process; a new process would import for a second."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from flashsmith.cli import main


def variables(**environment: str) -> dict[str, str]:
    """Those of this process and these, without a selection of kernels."""
    return {name: value for name, value in os.environ.items() if name != "KERNELS"} | environment


def flashsmith(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command with these variables."""
    status: str | int | None = None
    # Paths are written as bytes.
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        mock.patch.dict(os.environ, variables(**environment), clear=True),
        mock.patch.object(sys, "argv", ["flashsmith", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            status = end.code
    said = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(arguments, int(status or 0), *said)
