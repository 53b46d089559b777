"""The `flashsmith` command as users start it, piped, with its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import command_in_process
import pytest
import shared_kernels
import typer
from command_in_process import variables
from typer.models import OptionInfo

from flashsmith.cli import app
from flashsmith.env import VARIABLES
from flashsmith.families import get_kernel_configs, parse_kernel_name_into_config

STEP_1 = "(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles"
STEP_2 = "(FP16, 128, 64, 64, 4): async+swizzled+load_0_0_0_tiles"
ILLEGAL = "(FP16, 128, 64, 64, 8): load_2_4_0_tiles"


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, which imports everything anew."""
    return subprocess.run(
        [sys.executable, "-c", "from flashsmith.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=variables(COLUMNS="80"),
    )


def flashsmith(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process."""
    return command_in_process.flashsmith(*arguments, **{"COLUMNS": "80", **environment})


def test_version() -> None:
    done = process("--version")
    assert done.returncode == 0
    assert done.stdout == "flashsmith 0.1.0\n"


def test_an_error_is_one_message_and_a_status() -> None:
    done = process("configs", "-k", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("flashsmith: kernels='nonsense'")
    assert done.stderr == flashsmith("configs", "-k", "nonsense").stderr


@pytest.mark.parametrize("command", ["run", "explain", "configs", "build", "cache", "env"])
def test_every_command_has_help(command: str) -> None:
    done = flashsmith(command, "--help")
    assert done.returncode == 0
    assert "Usage: " in done.stdout


def _options(app: typer.Typer) -> Iterator[tuple[str, OptionInfo]]:
    """Every parameter of every command that is an option, with what declares it."""
    for group in app.registered_groups:
        assert group.typer_instance
        yield from _options(group.typer_instance)
    for command in app.registered_commands:
        assert command.callback
        hints = get_type_hints(command.callback, include_extras=True)
        for name, hint in hints.items():
            # Python 3.10 makes it Optional[Annotated[...]] where the default is None.
            for part in (hint, *get_args(hint)):
                for declared in getattr(part, "__metadata__", ()):
                    if isinstance(declared, OptionInfo):
                        yield name, declared


def test_no_option_is_named_by_what_stands_for_its_value() -> None:
    """typer 0.27 calls one '--PROBLEM' whose metavar is its parameter's name and that has no
    other."""
    options = list(_options(app))
    assert len(options) > 60
    for name, option in options:
        # Inside of Annotated the first of its names stands where a default value would.
        assert str(option.default).startswith("-") or (option.metavar or "").lower() != name


def test_piped_tables_are_plain_and_whole() -> None:
    done = flashsmith("configs", "--kernels", "prog-all")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    for cfg in get_kernel_configs("prog-all"):
        assert f"| {cfg} " in done.stdout
    assert "56 configs" in done.stdout


def test_a_piped_row_parses_back() -> None:
    rows = flashsmith("configs", "--kernels", "prog").stdout.splitlines()[2:9]
    assert [parse_kernel_name_into_config(row) for row in rows] == get_kernel_configs("prog")


def test_kernels_come_from_the_environment_too() -> None:
    facts = json.loads(flashsmith("configs", "--json", KERNELS=STEP_1).stdout)
    assert [fact["short_form"] for fact in facts] == [STEP_1]
    assert facts[0]["smem_bytes"] == (64 + 2 * 64) * 128 * 2
    assert facts[0]["legal"] is True


def test_the_option_beats_the_environment() -> None:
    facts = json.loads(flashsmith("configs", "--json", "-k", STEP_2, KERNELS="tune").stdout)
    assert [fact["short_form"] for fact in facts] == [STEP_2]


def test_configs_without_a_key_lists_the_sets() -> None:
    sizes = json.loads(flashsmith("configs", "--json").stdout)
    assert (sizes["prog"], sizes["prog-all"], sizes["tune"], sizes["64,64"]) == (7, 56, 80, 32)
    table = flashsmith("configs").stdout
    for key, size in sizes.items():
        assert f"| {key} " in table
        assert f" {size} |" in table


@pytest.mark.parametrize(
    ("command", "key"), [("configs", "nonsense"), ("build", " "), ("run", "7,7")]
)
def test_an_unusable_key_lists_the_keys(command: str, key: str) -> None:
    arguments = (command, "-k", key)
    done = flashsmith(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "flashsmith: kernels" in done.stderr
    assert "prog-all (56)" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_arch_lists_the_known_ones() -> None:
    done = flashsmith("configs", "-k", "prog", "--arch", "sm_20")
    assert done.returncode == 2
    assert "A100 (sm_80)" in done.stderr


def test_the_architecture_changes_the_figures() -> None:
    wide = "(FP16, 128, 128, 128, 8): async+swizzled+load_2_2_2_tiles"
    ctas = {
        arch: json.loads(flashsmith("configs", "-k", wide, "--arch", arch, "--json").stdout)[0][
            "ctas_per_sm_by_smem"
        ]
        for arch in ("sm_80", "90")
    }
    # 98,304 bytes and 1,024 reserved, of 167,936 on an A100 and 233,472 on an H100.
    assert ctas == {"sm_80": 1, "90": 2}


def test_env_lists_every_variable() -> None:
    done = flashsmith("env", FLASHSMITH_JOBS="3")
    for variable in VARIABLES:
        assert f"| {variable.name} " in done.stdout
    values = {
        entry["name"]: entry["value"]
        for entry in json.loads(flashsmith("env", "--json", FLASHSMITH_JOBS="3").stdout)
    }
    assert values["FLASHSMITH_JOBS"] == "3"
    assert values["KERNELS"] is None


def test_a_bad_variable_is_an_error_that_names_it() -> None:
    done = flashsmith("cache", "prune", FLASHSMITH_CACHE_LIMIT="lots")
    assert done.returncode == 2
    assert "FLASHSMITH_CACHE_LIMIT='lots'" in done.stderr


@pytest.mark.parametrize(
    ("system", "machine"), [("win32", "AMD64"), ("darwin", "arm64"), ("linux", "riscv64")]
)
def test_other_platforms_are_refused(system: str, machine: str) -> None:
    code = (
        "import platform, sys\n"
        "from flashsmith.cli import main\n"
        f"sys.platform = {system!r}\n"
        f"platform.machine = lambda: {machine!r}\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "Linux x86-64 and aarch64 only" in done.stderr
    assert "0.1.0" not in done.stdout


def test_an_illegal_config_is_explained_and_fails() -> None:
    done = flashsmith("explain", ILLEGAL)
    assert done.returncode == 1
    assert "Rules: ILLEGAL" in done.stdout
    for rule in ("warp_rows_in_mma_steps", "Q_and_K_load_counts_agree"):
        assert f"| NO    | {rule} " in done.stdout
    assert "nearest legal configs:" in done.stdout


def test_an_illegal_config_never_reaches_the_compiler(tmp_path: Path) -> None:
    done = flashsmith("build", "-k", ILLEGAL, FLASHSMITH_CACHE_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "is illegal" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_tiles_do_not_divide_is_refused_before_the_build(tmp_path: Path) -> None:
    done = flashsmith("run", "-k", STEP_1, "--seq", "100", FLASHSMITH_CACHE_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "seq=100: must be a multiple of B_r=64" in done.stderr
    assert list(tmp_path.iterdir()) == []


shared_kernels.want(map(parse_kernel_name_into_config, (STEP_1, STEP_2)))


@pytest.fixture
def built() -> None:
    """The kernels of STEP_1 and STEP_2, in the cache that the command uses."""
    shared_kernels.load(list(map(parse_kernel_name_into_config, (STEP_1, STEP_2))))


@pytest.mark.usefixtures("built")
def test_run_builds_proves_and_tells_what_swizzling_did() -> None:
    key = f"{STEP_1}; {STEP_2}"
    done = process("run", "--emulate", "--seq", "128", "--check", "-k", key)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "problem: batch 1, seq 128, heads 2, d_head 128, fp16" in done.stdout
    assert "the emulator, every check on" in done.stdout
    assert f"| {STEP_1} " in done.stdout
    assert f"| {STEP_2} " in done.stdout
    assert "2 of 2 kernels passed" in done.stdout
    assert done.stderr.splitlines()[0] == "looking up kernels and compiler"

    report = json.loads(flashsmith("run", "--emulate", "--seq", "128", "-k", key, "--json").stdout)
    plain, swizzled = report["kernels"]
    assert report["backend"] == "emulator"
    assert (plain["config"], swizzled["config"]) == (STEP_1, STEP_2)
    assert plain["conflicts"]["ldmatrix"] == 8.0
    assert swizzled["conflicts"]["ldmatrix"] == 1.0
    for row in (plain, swizzled):
        assert row["verdict"] == "pass"
        assert 0 < row["max_error"] <= row["bound"]
        assert 0 < row["registers"] <= 255
        assert row["smem_bytes"] == 49152
        assert row["ctas_per_sm"] >= 1
        assert row["instructions"] > 1000
        assert set(row["conflicts"]) == {"ldmatrix", "copy st", "O st", "O ld"}


@pytest.mark.usefixtures("built")
def test_explain_a_legal_config() -> None:
    facts = json.loads(flashsmith("explain", STEP_2, "--arch", "sm_80", "--json").stdout)
    assert facts["legal"] is True
    assert facts["verdict"] == "pass"
    assert [region["end"] for region in facts["smem"]] == [16384, 32768, 49152]
    assert facts["occupancy"]["limited_by"]
    assert facts["static_instructions"]["mma"] == 128
    # 4 warps of one Q block, and 2 steps of 8 x 8 mma for S and 16 x 4 for O.
    assert facts["dynamic_instructions"]["mma"] == 4 * 2 * 128
    assert facts["bank_conflicts"]["ldmatrix"] == 1.0
    text = flashsmith("explain", STEP_2, "--arch", "sm_80").stdout
    for section in ("Rules: legal", "Knobs", "Shared memory", "Compiler", "Occupancy"):
        assert section in text


@pytest.fixture
def small_cache(tmp_path: Path) -> str:
    """A cache of its own that holds one library."""
    shared_kernels.with_host_code(tmp_path)
    assert flashsmith("build", "-k", STEP_1, FLASHSMITH_CACHE_DIR=str(tmp_path)).returncode == 0
    return str(tmp_path)


def test_the_life_of_a_library(small_cache: str) -> None:
    def cache(*arguments: str) -> subprocess.CompletedProcess[str]:
        return flashsmith("cache", *arguments, FLASHSMITH_CACHE_DIR=small_cache)

    assert cache("path").stdout.strip() == f"{small_cache}/flashsmith-cache-1"
    assert cache().stdout == cache("list").stdout
    (entry,) = json.loads(cache("list", "--json").stdout)
    assert entry["configs"] == [STEP_1]
    assert entry["damage"] is None
    assert cache("verify").stdout == "1 library, 0 damaged\n"

    facts = flashsmith("configs", "-k", STEP_1, "--json", FLASHSMITH_CACHE_DIR=small_cache)
    assert json.loads(facts.stdout)[0]["built"] is True

    library = next(Path(entry["path"]).glob("*.so"))
    library.chmod(0o644)
    content = library.read_bytes()
    library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    damaged = cache("verify")
    assert damaged.returncode == 1
    assert "1 library, 1 damaged" in damaged.stdout

    assert cache("prune", "--limit", "-1").returncode == 2
    assert cache("clear").stdout.startswith("removed 1 library")
    assert json.loads(cache("list", "--json").stdout) == []
