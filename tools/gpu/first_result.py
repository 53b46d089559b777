"""Times the first result of fresh processes on a GPU: PyTorch alone, and flashsmith with installed
kernels and no compiler.

    python tools/gpu/first_result.py package SITE [--device H200]    needs a compiler, no GPU
    python tools/gpu/first_result.py time SITE [--rounds 15] [--csv FILE]    the reverse

``package`` puts flashsmith and the one kernel of the timed call into the folder SITE, as pip would,
with compiled Python files. ``time`` starts processes alternately. Each imports torch, makes a CUDA
context and three tensors; one kind then calls scaled_dot_product_attention(), the other imports
flashsmith and calls attention(). SITE and the home folder cannot be written to, and PATH is empty.

It prints medians of the seconds from a process's start to its first result, and what differs. It
fails if a result is wrong, if the kernel is not the installed one, if flashsmith warned, or if
anything was written.
"""

from __future__ import annotations

import argparse
import compileall
import csv
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

PROBLEM = "b2 s4096 h16 d128 bf16 causal"
COLUMNS = ("round", "kind", "torch_s", "import_s", "call_s", "total_s")

# argv: the time when the parent started this process, and the kind.
PROCESS = """
import json, sys, time

begin, kind = float(sys.argv[1]), sys.argv[2]
import torch

q, k, v = (torch.randn(2, 4096, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.cuda.synchronize()
ready = time.time()


def by_pytorch():
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    return o.transpose(1, 2)


imported = ready
if kind == "pytorch":
    o = by_pytorch()
else:
    import flashsmith

    attention = flashsmith.attention
    imported = time.time()
    o = attention(q, k, v, causal=True)
torch.cuda.synchronize()
end = time.time()
facts = {
    "torch_s": ready - begin,
    "import_s": imported - ready,
    "call_s": end - imported,
    "total_s": end - begin,
}
if kind != "pytorch":
    from flashsmith.runtime.libraries import loaded_kernels

    assert (o.float() - by_pytorch().float()).abs().max() < 2e-2
    (kernel,) = loaded_kernels.kernels.values()
    assert kernel.library.is_installed
    facts["library"] = str(kernel.library.path)
    facts["version"] = flashsmith.__file__
print(json.dumps(facts))
"""


def package(site: Path, device: str) -> None:
    """Puts flashsmith and the timed call's kernel into ``site``."""
    from flashsmith.builder.package_build import build_package
    from flashsmith.builder.package_wheel import write_wheels
    from flashsmith.chooser import choose
    from flashsmith.host import this_cpu

    choice = choose(PROBLEM, device)
    semantics = choice.problem.required_semantics(choice.config)
    arch = choice.device.arch
    libraries = build_package({semantics: [choice.config]}, arch=arch)
    shutil.rmtree(site, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        (wheel,) = write_wheels(libraries, arch, this_cpu(), Path(folder))
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {choice.config}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    source = Path(__file__).parents[2] / "src" / "flashsmith"
    shutil.copytree(source, site / "flashsmith", ignore=shutil.ignore_patterns("__pycache__"))
    facts = importlib.metadata.distribution("flashsmith")
    info = site / f"flashsmith-{facts.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(str(facts.read_text("METADATA")), encoding="utf-8")


def run(site: Path, home: Path, kind: str) -> dict[str, Any]:
    """The figures of one process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHSMITH")}
    environment = {
        **kept,
        **dict.fromkeys(("PATH", "CUDA_HOME"), "/nonexistent"),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(site), kept.get("PYTHONPATH")))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    begin = time.time()
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROCESS, repr(begin), kind],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode != 0 or "flashsmith:" in done.stderr:
        raise SystemExit(done.stdout + done.stderr)
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def measure(site: Path, rounds: int, path: Path | None) -> None:
    """Times processes alternately, and prints the medians."""
    # Here and not in package(): Python files are compiled for one version of Python.
    if not compileall.compile_dir(site, quiet=2):
        raise SystemExit(f"{site}: its Python files do not compile")
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*")}
    for path_in_site in before:
        path_in_site.chmod(0o555 if path_in_site.is_dir() else 0o444)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        home.mkdir(mode=0o555)
        kinds = ("pytorch", "flashsmith")
        run(site, home, "pytorch")  # files into the page cache
        by_pytorch = {*home.rglob("*")}
        facts = run(site, home, "flashsmith")
        print(f"kernels of {facts['library']}, Python of {facts['version']}")
        for number in range(rounds):
            for kind in kinds[:: 1 if number % 2 else -1]:
                rows.append({"round": number, "kind": kind, **run(site, home, kind)})
        written = [*({*home.rglob("*")} - by_pytorch), *({*site.rglob("*")} - {*before})]
    if written or any(path.stat().st_mtime_ns != then for path, then in before.items()):
        raise SystemExit(f"written: {written or 'files of SITE changed'}")
    if path is not None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(
                {name: f"{it:.4f}" if isinstance(it, float) else it for name, it in row.items()}
                for row in rows
            )
    report(rows)


def report(rows: list[dict[str, Any]]) -> None:
    """Prints medians, and how much later flashsmith's first result is."""
    medians = {
        kind: {
            name: statistics.median(row[name] for row in rows if row["kind"] == kind)
            for name in COLUMNS[2:]
        }
        for kind in ("pytorch", "flashsmith")
    }
    for kind, found in medians.items():
        print(f"{kind:10}", ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    theirs, ours = medians["pytorch"], medians["flashsmith"]
    beyond = ours["import_s"] + ours["call_s"]
    print(
        f"first result: {ours['total_s'] - theirs['total_s']:+.3f} s against "
        f"scaled_dot_product_attention(); {beyond:.3f} s beyond PyTorch's own start"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("package", "time"))
    parser.add_argument("site", type=Path)
    parser.add_argument("--device", default="H200")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--csv", type=Path)
    asked = parser.parse_args()
    site = asked.site.absolute()
    if asked.step == "package":
        package(site, asked.device)
    else:
        measure(site, asked.rounds, asked.csv)


if __name__ == "__main__":
    main()
