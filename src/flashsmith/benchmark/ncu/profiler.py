"""Nsight Compute: finds it, runs it on a job, and returns the counters or its error output."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flashsmith import env
from flashsmith.benchmark.ncu.counters import (
    ProfiledLaunch,
    Selection,
    TruncatedPage,
    merged,
    parse_listing,
    parse_raw_page,
    unknown_metrics,
)
from flashsmith.benchmark.ncu.profiled_process import ProfiledKernel, ProfilingJob
from flashsmith.builder.demangle import demangle
from flashsmith.errors import ConfigParseError, ProfilerError
from flashsmith.families import KernelConfig, Problem, parse_kernel_name_into_config

_PROFILED = "flashsmith.benchmark.ncu.profiled_process"
# The most attempts to run the profiler. If a metric is unknown, the profiler stops before it
# launches anything. The next name of that metric is then tried; every column has only a few names.
_MOST_ATTEMPTS = 12
_WORDS = 4000
# The role of a call's main kernel; the name of that kernel contains the config.
_MAIN = "main"
# Generous time limits for the proof of a kernel, and for its launches, each of which the profiler
# repeats for every small group of counters.
_SECONDS_TO_BEGIN = 300.0
_SECONDS_A_USE = 60.0
_REPLAYS = 50
_LEAST_FLOP_PER_SECOND = 5e12
# Where NVIDIA's installers put ncu. Sorted by version, the newest last.
_INSTALLED = ("usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")


def find_ncu(root: Path = Path("/")) -> Path:
    """The path of `ncu`, searched for on PATH, then in CUDA_HOME, then below `root` (the newest
    one).

    Raises ProfilerError, which lists the places that were searched.
    """
    looked = ["PATH"]
    if on_path := shutil.which("ncu"):
        return Path(on_path)
    if home := env.CUDA_HOME.raw():
        own = Path(home) / "bin" / "ncu"
        looked.append(str(own))
        if _usable(own):
            return own
    for pattern in _INSTALLED:
        looked.append(str(root / pattern))
        if found := [path for path in sorted(root.glob(pattern), key=_version) if _usable(path)]:
            return found[-1]
    raise ProfilerError(
        f"ncu: Nsight Compute was not found; looked at {', '.join(looked)}. It comes with a CUDA "
        "toolkit; put its folder on PATH"
    )


def _usable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


@dataclass(frozen=True)
class ProfiledUse:
    """The result for one kernel on one problem: the profiled launches, and why the kernel is wrong
    ('' if it is correct)."""

    use: ProfiledKernel
    wrong: str
    launches: list[ProfiledLaunch]


@dataclass(frozen=True)
class _Ended:
    """The result of a profiler process: exit status, log, and other output."""

    code: int
    log: str
    words: str


class Profiler:
    """Nsight Compute, for the first GPU of this machine.

    Raises ProfilerError, with the output of the profiler, if it cannot list the metrics of that
    GPU.
    """

    def __init__(self, ncu: Path) -> None:
        self.ncu = ncu
        self.version = self._version()
        listing = self._run(["--query-metrics"], Path.cwd())
        listed = parse_listing(listing.log or listing.words)
        if listing.code or not listed:
            raise _failure("cannot list this GPU's metrics", listing)
        self.selection = Selection(listed)

    def profile(self, uses: tuple[ProfiledKernel, ...], runs: int) -> tuple[list[ProfiledUse], str]:
        """Profiles the given kernels in one process, in order.

        Returns the results, and why some results are missing ('' if all are there).

        Raises ProfilerError, with the output of the profiler, if the profiler fails or takes too
        long.
        """
        with tempfile.TemporaryDirectory(prefix="flashsmith-ncu-") as folder:
            scratch = Path(folder)
            job = ProfilingJob(uses, runs, str(scratch / "verdicts.json"))
            (scratch / "job.json").write_bytes(msgspec.json.encode(job))
            for _ in range(_MOST_ATTEMPTS):
                ended = self._run(self._options(scratch), scratch, time_limit(uses, runs))
                unknown = unknown_metrics(ended.log + ended.words) - self.selection.missing
                if not unknown:
                    return _assigned(ended, job)
                self.selection.missing |= unknown
        raise _failure("rejects all requested metrics", ended)

    def _options(self, scratch: Path) -> list[str]:
        return [
            *("--csv", "--page", "raw", "--print-units", "base"),
            # Some versions shorten demangled names, but not mangled ones.
            *("--print-kernel-base", "mangled"),
            # The clocks of the GPU are not locked; each row records the SM clock.
            *("--clock-control", "none"),
            *("--profile-from-start", "off"),
            *("--target-processes", "application-only"),
            *("--metrics", ",".join(self.selection.metrics)),
            *("--log-file", str(scratch / "log")),
            *(sys.executable, "-m", _PROFILED, str(scratch / "job.json")),
        ]

    def _run(self, options: list[str], scratch: Path, seconds: float = _SECONDS_TO_BEGIN) -> _Ended:
        log = scratch / "log"
        try:
            # The profiler gets its own session, so that the process under it is killed together
            # with it.
            process = subprocess.Popen(
                [str(self.ncu), *options],
                env=env.profiled_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise ProfilerError(f"ncu: {self.ncu} does not run: {error}") from error
        late = False
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            late = True
            _kill(process)
            said, _ = process.communicate()
        except BaseException:
            _kill(process)
            raise
        written = (
            log.read_text(errors="replace") if "--log-file" in options and log.exists() else ""
        )
        ended = _Ended(process.returncode, written, said)
        if late:
            raise _failure(f"did not end within {seconds:.0f} s and was stopped", ended)
        return ended

    def _version(self) -> str:
        ended = self._run(["--version"], Path.cwd())
        match = re.search(r"Version ([\d.]+)", ended.words)
        if ended.code or match is None:
            raise _failure("does not report its version", ended)
        return match[1]


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def time_limit(uses: tuple[ProfiledKernel, ...], runs: int) -> float:
    """The seconds after which a process that profiles these kernels counts as hanging."""
    flop = sum(Problem.parse(use.problem).attn_flop() for use in uses)
    replayed = _REPLAYS * runs * flop / _LEAST_FLOP_PER_SECOND
    return _SECONDS_TO_BEGIN + _SECONDS_A_USE * len(uses) + replayed


def _assigned(ended: _Ended, job: ProfilingJob) -> tuple[list[ProfiledUse], str]:
    """Assigns the launches on a page, which may be incomplete, to the kernels to profile."""
    why = ""
    try:
        launches = parse_raw_page(ended.log)
    except TruncatedPage as cut:
        launches, why = cut.launches, str(cut)
    except ValueError as error:
        raise _failure(f"failed: {error}", ended) from error
    if ended.code:
        why = why or f"it ended with exit status {ended.code}"
    path = Path(job.verdicts)
    verdicts = json.loads(path.read_text()) if path.exists() else []
    waiting = deque(launches)
    profiled: list[ProfiledUse] = []
    for use, wrong in zip(job.uses, verdicts, strict=False):
        own = []
        for _ in range(0 if wrong else job.runs):
            call = _next_call(waiting, use, ended)
            if not call:
                break
            own.append(merged(call))
        if not wrong and len(own) < job.runs:
            names = ", ".join(sorted({launch.kernel for launch in launches})) or "none"
            why = why or f"its page has no launch of {use.config}; kernels on it: {names}"
            break
        profiled.append(ProfiledUse(use, wrong, own))
    if len(profiled) < len(job.uses):
        why = why or "the profiled process stopped before the end"
    return profiled, str(_failure(why, ended)) if why else ""


def _next_call(
    waiting: deque[ProfiledLaunch], use: ProfiledKernel, ended: _Ended
) -> dict[str, ProfiledLaunch]:
    """Removes the launches of the kernel's next call from ``waiting`` and returns them by role.

    When a role occurs again, another call begins. Launches of kernels that are not flashsmith's are
    skipped.

    Raises ProfilerError if a kernel with another config was launched.
    """
    cfg = parse_kernel_name_into_config(use.config)
    templates = cfg.family.kernel_templates(cfg)
    call: dict[str, ProfiledLaunch] = {}
    while waiting:
        kernel = waiting[0].kernel
        role = next((role for role, name in templates.items() if name in kernel), "")
        spelled = None if role and role != _MAIN else _config_of(kernel)
        if role in call or (call and not role and spelled):
            break
        if spelled not in (None, cfg):
            raise _failure(f"profiled {spelled} where {cfg} was launched", ended)
        launch = waiting.popleft()
        if role and (role != _MAIN or spelled):
            call[role] = launch
    return call


def _config_of(kernel: str) -> KernelConfig | None:
    """The config in a kernel's name; None if the kernel is not flashsmith's."""
    try:
        return parse_kernel_name_into_config(demangle(kernel) if kernel[:2] == "_Z" else kernel)
    except (ConfigParseError, ValueError):
        return None


def _failure(what: str, ended: _Ended) -> ProfilerError:
    lines = [line for line in ended.log.splitlines() if not line.startswith('"')]
    words = "\n".join([*lines, *ended.words.splitlines()]).strip()
    advice = ""
    if "ERR_NVGPUCTRPERM" in words:
        advice = (
            "\nOnly administrators may read the counters here: run as root, or load the driver "
            "with NVreg_RestrictProfilingToAdminUsers=0"
        )
    return ProfilerError(f"ncu: {what}; its output:\n{words[-_WORDS:] or '(nothing)'}{advice}")
