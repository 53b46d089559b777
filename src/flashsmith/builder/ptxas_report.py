"""Reads what ``-Xptxas -v`` prints for each kernel; nothing else reports the spilled bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ResourceReport:
    """What the compiler reports about one kernel.

    Bytes of stack and spills are per thread, bytes of shared memory per CTA.

    ``warnings`` has each warning that names the kernel once, in the form 'C7510: message'.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int
    ptxas_seconds: float
    warnings: tuple[str, ...] = ()


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_TIME = re.compile(r"Compile time = ([\d.]+) ms")
# The pattern of a warning. Warnings precede the first entry; they report lost performance, or
# instructions that ptxas has inserted for correctness.
_WARNING = re.compile(
    r"\((C\d+)\) (?:Potential Performance Loss: (.*)|(warpgroup\.\w+ is injected .*))"
)
_NAMED = re.compile(r"(.*) in (?:the )?function '([^']+)'.*")
_LINE_NUMBER = re.compile(r" in around line \d+")


def parse_ptxas_report(text: str) -> dict[str, ResourceReport]:
    """Reads the verbose output of ptxas.

    Returns the report on each entry function, by mangled name.

    Raises ValueError if an expected line is missing, for example because the format of the output
    is unknown.
    """
    reports: dict[str, ResourceReport] = {}
    warnings = _warnings(text)
    starts = list(_ENTRY.finditer(text))
    ends = [*(start.start() for start in starts[1:]), len(text)]
    for start, end in zip(starts, ends, strict=False):
        name = start[1]
        # The frame sizes of device functions that were not inlined follow, under the names of these
        # functions.
        body = text[start.end() : end]
        own = re.search(rf"Function properties for {re.escape(name)}\s*\n(.*)", body)
        frame = _FRAME.search(own[1]) if own else None
        used = _USED.search(body)
        if frame is None or used is None:
            raise ValueError(f"ptxas did not report the registers or stack frame of {name}")
        took = _TIME.search(body)
        reports[name] = ResourceReport(
            registers=int(used[1]),
            stack_bytes=int(frame[1]),
            spill_store_bytes=int(frame[2]),
            spill_load_bytes=int(frame[3]),
            static_smem_bytes=int(used[2] or 0),
            ptxas_seconds=float(took[1]) / 1000 if took else 0.0,
            warnings=tuple(warnings.get(name, ())),
        )
    return reports


def nameless_warnings(text: str) -> tuple[str, ...]:
    """Returns the warnings that do not name a kernel, each once.

    Each of them was caused by one of the kernels that were compiled.
    """
    return tuple(_warnings(text).get("", ()))


def _warnings(text: str) -> dict[str, list[str]]:
    """The warnings, grouped by the kernel that they name; warnings that name no kernel have the key
    ""."""
    found: dict[str, list[str]] = {}
    for code, loss, injected in _WARNING.findall(text):
        words = _LINE_NUMBER.sub("", loss or injected).strip()
        named = _NAMED.fullmatch(words)
        words, name = named.groups() if named else (words, "")
        listed = found.setdefault(name, [])
        if f"{code}: {words}" not in listed:
            listed.append(f"{code}: {words}")
    return found
