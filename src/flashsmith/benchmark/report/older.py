"""Rows in other forms than BenchRow: `flashsmith run --json`, and semantics-speed.csv."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from flashsmith.benchmark.json_numbers import from_json
from flashsmith.benchmark.report.cells import OURS
from flashsmith.benchmark.rows import BenchRow
from flashsmith.configs import parse_kernel_name_into_config
from flashsmith.errors import ArgumentError, ConfigParseError

SPEED_COLUMNS = {"kind", "dtype", "d", "seq", "batch", "heads", "heads_k", "contender", "right"}
_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
_SEMANTICS = {
    "full": "plain",
    "causal": "causal",
    "gqa": "causal",
    "packed": "causal+packed",
    "short": "uneven",
}
_CONTENDERS = {"attention()": OURS, "FA2": "fa2"}


def read_speed(path: Path) -> list[BenchRow]:
    """The rows of benchmarks/h200/semantics-speed.csv; they name no environment.

    Raises ArgumentError with the line of the first row that is of no use.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = []
        for record in reader:
            try:
                rows.append(_speed_row(record))
            except (KeyError, TypeError, ValueError) as error:
                raise ArgumentError(
                    f"{path}, line {reader.line_num}: {error!r} is of no use here"
                ) from error
    return rows


def _speed_row(record: dict[str, str]) -> BenchRow:
    kind, contender = record["kind"], _CONTENDERS.get(record["contender"], record["contender"])
    heads = int(record["heads"])
    return BenchRow(
        contender=contender,
        kind="ours" if contender == OURS else "peer",
        family="",
        config="",
        batch=int(record["batch"]),
        seq_q=int(record["seq"]),
        seq_k=int(record["seq"]),
        heads_q=heads,
        heads_k=int(record["heads_k"] or heads),
        d=int(record["d"]),
        dtype=_DTYPES[record["dtype"]],
        semantics=_SEMANTICS[kind],
        verdict="pass" if record["right"] == "True" else "fail",
        ms=float(record["ms"]),
        tflops=float(record["tflops"]),
        rel_l2=float(record["relative_l2"]),
    )


def rows_of_run(value: dict[str, Any]) -> list[BenchRow]:
    """The kernels of `flashsmith run --json`; those without a time only where they failed.

    Raises ArgumentError with the number of the first kernel that is of no use.
    """
    rows = []
    for number, kernel in enumerate(value["kernels"], 1):
        try:
            rows.append(_run_row(value, kernel))
        except (KeyError, TypeError, ValueError, ConfigParseError) as error:
            raise ArgumentError(f"kernel {number}: {error!r} is of no use here") from error
    return [row for row in rows if row.ms is not None or row.verdict == "fail"]


def _run_row(value: dict[str, Any], kernel: dict[str, Any]) -> BenchRow:
    config = parse_kernel_name_into_config(kernel["config"])
    proven = value["proven"] | {"seq": kernel.get("proven_seq", value["proven"]["seq"])}
    size = value["timed"] or proven
    timing = kernel["timing"] or {}
    return BenchRow(
        contender=kernel["config"],
        kind="ours",
        family=config.FAMILY,
        config=kernel["config"],
        batch=size["batch"],
        seq_q=size["seq"],
        seq_k=size["seq"],
        heads_q=size["heads"],
        heads_k=size["heads"],
        d=config.d_head,
        dtype=config.dtype.name.lower(),
        semantics="plain",
        verdict="pass" if kernel["verdict"] == "pass" else "fail",
        note="; ".join(kernel["problems"]),
        ms=timing.get("ms"),
        best_ms=timing.get("best_ms"),
        spread=timing.get("spread"),
        tflops=timing.get("tflops"),
        max_error=from_json(kernel["max_error"]),
        error_bound=from_json(kernel["bound"]),
        rel_l2=from_json(kernel["rel_l2"]),
        protocol="flashsmith run",
        registers=kernel["registers"],
        spill_bytes=kernel["spill_store_bytes"] + kernel["spill_load_bytes"],
        smem_bytes=kernel["smem_bytes"],
        ctas_per_sm=kernel["ctas_per_sm"],
        gpu=value["device"] if value["backend"] == "gpu" else "",
        arch=int(str(value["arch"]).removeprefix("sm_")),
    )
