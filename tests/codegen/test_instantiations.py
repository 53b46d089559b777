"""The generated C++: what it says, and that it is left alone when it is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashsmith.codegen import generate_kernel_instantiations
from flashsmith.configs import get_kernel_configs, get_kernel_progression_configs
from flashsmith.errors import ArgumentError

CSRC = Path(__file__).parents[2] / "src" / "flashsmith" / "csrc"
SCRIPT = Path(__file__).parents[2] / "tools" / "build" / "generate_kernel_instantiations.py"
CONFIGS = get_kernel_progression_configs()


@pytest.fixture
def sources(tmp_path):
    return generate_kernel_instantiations(CONFIGS, tmp_path, n_shards=2)


def test_the_map_has_one_entry_per_config_under_its_short_form(sources):
    lines = sources.map_header.read_text().splitlines()
    for cfg in CONFIGS:
        at = lines.index(f"    // {cfg.short_form()}")
        assert lines[at + 1] == f"    {{{cfg.to_cpp_struct()}, kernel_{cfg.kernel_name()}()}},"
    assert sum(line.startswith("    {FlashForwardKernelConfig{.dtype") for line in lines) == len(
        CONFIGS
    )


def test_each_config_is_instantiated_in_the_shard_it_is_listed_for(sources):
    assert len(sources.shards) == 2
    for path, configs in zip(sources.shards, sources.shard_configs, strict=True):
        text = path.read_text()
        functions = re.findall(r"^forward_kernel_fn (\w+)\(\) \{$", text, re.MULTILINE)
        assert functions == [f"kernel_{cfg.kernel_name()}" for cfg in configs]
        for cfg in configs:
            assert f"// {cfg.short_form()}\nforward_kernel_fn kernel_{cfg.kernel_name()}()" in text
            assert f"StaticForwardKernelConfig<{cfg.to_cpp_struct()}>" in text


def test_the_generated_map_finds_every_kernel(sources, tmp_path):
    """Compiled by the host compiler, with plain functions in place of the kernels."""
    stubs = "".join(
        f"static void body_{i}(const ForwardKernelArgs) {{}}\n"
        f"forward_kernel_fn kernel_{cfg.kernel_name()}() {{ return &body_{i}; }}\n"
        for i, cfg in enumerate(CONFIGS)
    )
    checks = "".join(
        f"    if (map.at({cfg.to_cpp_struct()}) != kernel_{cfg.kernel_name()}()) return {i + 1};\n"
        for i, cfg in enumerate(CONFIGS)
    )
    main = tmp_path / "main.cc"
    main.write_text(
        '#include "flash_kernels.cuh"\n#include "launch_plan.cuh"\n'
        f"namespace flashsmith {{\n{stubs}}}\n"
        "using namespace flashsmith;\nint main() {\n    const auto& map = kernel_map();\n"
        f"{checks}    return map.size() == {len(CONFIGS)} ? 0 : 100;\n}}\n"
    )
    program = tmp_path / "main"
    subprocess.run(
        ["g++", "-std=c++20", f"-I{CSRC}", f"-I{tmp_path}", "-o", program, main, sources.library],
        check=True,
    )
    assert subprocess.run([program], check=False).returncode == 0


def test_a_file_that_is_right_is_not_touched(sources, tmp_path):
    paths = (*sources.shards, sources.map_header, sources.library)
    for path in paths:
        os.utime(path, (1, 1))
    generate_kernel_instantiations(reversed(CONFIGS), tmp_path, n_shards=2)
    assert [path.stat().st_mtime for path in paths] == [1] * len(paths)


def test_a_file_that_differs_is_rewritten(sources, tmp_path):
    for path in (sources.shards[0], sources.map_header):
        right = path.read_text()
        path.write_bytes(b"\xff damaged")
        generate_kernel_instantiations(CONFIGS, tmp_path, n_shards=2)
        assert path.read_text() == right


def test_shards_of_a_finer_split_are_removed(sources, tmp_path):
    again = generate_kernel_instantiations(CONFIGS, tmp_path, n_shards=1)
    assert sorted(tmp_path.glob("shard_*")) == list(again.shards) == [tmp_path / "shard_0.cu"]


def test_a_config_given_twice_is_instantiated_once(tmp_path):
    twice = generate_kernel_instantiations(CONFIGS + CONFIGS, tmp_path)
    assert [len(configs) for configs in twice.shard_configs] == [len(CONFIGS)]


def test_nothing_to_generate_is_an_error(tmp_path):
    with pytest.raises(ArgumentError, match="configs: empty"):
        generate_kernel_instantiations([], tmp_path)
    with pytest.raises(ArgumentError, match="n_shards=0"):
        generate_kernel_instantiations(CONFIGS, tmp_path, n_shards=0)


def run_script(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


def test_the_script_writes_the_same_text(tmp_path):
    done = run_script("--kernels", "prog", "--out", str(tmp_path / "a"), "--shards", "2")
    assert done.returncode == 0, done.stderr
    generate_kernel_instantiations(get_kernel_configs("prog"), tmp_path / "b", n_shards=2)
    assert sorted(done.stdout.split()) == sorted(str(p) for p in (tmp_path / "a").iterdir())
    for path in (tmp_path / "b").iterdir():
        assert (tmp_path / "a" / path.name).read_text() == path.read_text()


def test_the_script_refuses_an_unknown_key(tmp_path):
    done = run_script("--kernels", "nonsense", "--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "nonsense" in done.stderr
    assert list(tmp_path.iterdir()) == []
