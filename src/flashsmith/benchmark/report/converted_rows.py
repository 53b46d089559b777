"""Converts other formats to measurements: `flashsmith run --json`, and semantics-speed.csv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.measurement_files import read_csv, row_of
from flashsmith.errors import ArgumentError, ConfigParseError
from flashsmith.families import parse_kernel_name_into_config
from flashsmith.printable import quoted

SPEED_COLUMNS = {"kind", "dtype", "d", "seq", "batch", "heads", "heads_k", "contender", "right"}
_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
_SEMANTICS = {
    "full": "plain",
    "causal": "causal",
    "gqa": "causal",
    "packed": "causal+packed",
    "short": "uneven",
}
_CONTENDERS = {"attention()": "ours", "FA2": "fa2"}


def read_speed(path: Path) -> list[Measurement]:
    """Reads the rows of benchmarks/h200/semantics-speed.csv, which do not contain the environment.

    Raises ArgumentError with the number of the first line that cannot be used.
    """
    rows = []
    for line, record in read_csv(path)[1]:
        where = f"{path}, line {line}"
        try:
            rows.append(row_of(_of_speed(record), where))
        except KeyError as error:
            raise ArgumentError(
                f"{where}: {quoted(error.args[0], 80)} is not supported here"
            ) from error
    return rows


def _of_speed(record: dict[str, str]) -> dict[str, Any]:
    kind, contender = record["kind"], _CONTENDERS.get(record["contender"], record["contender"])
    return {
        "contender": contender,
        "kind": "ours" if contender == "ours" else "peer",
        "family": "",
        "config": "",
        "batch": record["batch"],
        "seq_q": record["seq"],
        "seq_k": record["seq"],
        "heads_q": record["heads"],
        "heads_k": record["heads_k"] or record["heads"],
        "d": record["d"],
        "dtype": _DTYPES[record["dtype"]],
        "semantics": _SEMANTICS[kind],
        "verdict": "pass" if record["right"] == "True" else "fail",
        "ms": record["ms"],
        "tflops": record["tflops"],
        "rel_l2": record["relative_l2"],
    }


def rows_of_run(value: dict[str, Any]) -> list[Measurement]:
    """The kernels in the output of `flashsmith run --json` that were timed or failed, as rows.

    Raises ArgumentError with the number of the first kernel that cannot be used.
    """
    if not isinstance(value["kernels"], list):
        raise ArgumentError("kernels must be a list")
    rows = []
    for number, kernel in enumerate(value["kernels"], 1):
        where = f"kernel {number}"
        try:
            rows.append(row_of(_of_run(value, kernel), where))
        except KeyError as error:
            raise ArgumentError(f"{where}: {error} is missing") from error
        except (TypeError, AttributeError, ConfigParseError) as error:
            raise ArgumentError(f"{where}: cannot be used: {error}") from error
    return [row for row in rows if row.ms is not None or row.verdict == "fail"]


def _of_run(value: dict[str, Any], kernel: dict[str, Any]) -> dict[str, Any]:
    config = parse_kernel_name_into_config(kernel["config"])
    proven = value["proven"] | {"seq": kernel.get("proven_seq", value["proven"]["seq"])}
    size = value["timed"] or proven
    timing = kernel["timing"] or {}
    return {
        "contender": kernel["config"],
        "kind": "ours",
        "family": config.FAMILY,
        "config": kernel["config"],
        "batch": size["batch"],
        "seq_q": size["seq"],
        "seq_k": size["seq"],
        "heads_q": size["heads"],
        "heads_k": size["heads"],
        "d": config.d_head,
        "dtype": config.dtype.name.lower(),
        "semantics": "plain",
        "verdict": "pass" if kernel["verdict"] == "pass" else "fail",
        "note": "; ".join(kernel["problems"]),
        "ms": timing.get("ms"),
        "best_ms": timing.get("best_ms"),
        "spread": timing.get("spread"),
        "tflops": timing.get("tflops"),
        "max_error": kernel["max_error"],
        "error_bound": kernel["bound"],
        "rel_l2": kernel["rel_l2"],
        "protocol": "flashsmith run",
        "registers": kernel["registers"],
        "spill_bytes": kernel["spill_store_bytes"] + kernel["spill_load_bytes"],
        "smem_bytes": kernel["smem_bytes"],
        "ctas_per_sm": kernel["ctas_per_sm"],
        "gpu": value["device"] if value["backend"] == "gpu" else "",
        "arch": str(value["arch"]).removeprefix("sm_"),
    }
