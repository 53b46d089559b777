"""tools/ci/same_ptx.py: what it takes for the same kernel, and what it does not."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TREE = Path(__file__).parents[1]
CONFIG = "(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax"
PTX = """\
// Compiler Build ID: CL-1
.version 9.0
.target sm_80
.visible .entry _Zkernel(
    .param .b64 _Zkernel_param_0
)
{
    .reg .b32 \t%r<9>;
    .loc 1 266 0
    mov.u32 %r3, %tid.x;  // a thread
$L__BB0_2:
    .loc 2 25 5, function_name $L__info_string1, inlined_at 1 21 78
    add.s32 %r4, %r3, 1;
    @%p1 bra $L__BB0_2;
    ret;
}
    .file 1 "forward_kernel.cuh"
"""


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("ci/same_ptx.py")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%r3", "%r77"),
        ("$L__BB0_2", "$L__BB5_19"),
        ("_Zkernel", "_Z5other"),
        ("CL-1", "CL-2"),
        (".loc 1 266 0", ".loc 1 9 4"),
        ("forward_kernel.cuh", "mma_sync/kernel.cuh"),
        ("\t%r<9>", " %r<90>"),
        ("  // a thread", ""),
    ],
)
def test_names_and_lines_do_not_count(tool: ModuleType, old: str, new: str) -> None:
    assert old in PTX
    assert tool.canonical(PTX.replace(old, new)) == tool.canonical(PTX)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%r3, 1", "%r3, 2"),
        ("%r4, %r3", "%r4, %r4"),
        ("add.s32", "sub.s32"),
        ("    ret;\n", ""),
        ("%tid.x", "%tid.y"),
        ("@%p1", "@!%p1"),
        ("sm_80", "sm_90a"),
    ],
)
def test_what_a_kernel_does_counts(tool: ModuleType, old: str, new: str) -> None:
    assert old in PTX
    assert tool.canonical(PTX.replace(old, new)) != tool.canonical(PTX)


def write_library(cache: Path, ptx: str, **changes: Any) -> None:
    """As a tree publishes one."""
    folder = cache / "libraries" / "a"
    folder.mkdir(parents=True)
    (folder / "k.ptx").write_text(ptx)
    kernel = {
        "short_form": CONFIG,
        "ptx_file": "k.ptx",
        "code_bytes": 1600,
        "registers": 168,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
    }
    semantics = {"mask": "none", "softcap": False, "packed": False, "uneven": False}
    version = changes.pop("nvcc_version", "13.0.1")
    data = {
        "arch": 80,
        "family": "mma_sync",
        "source_hash": "0" * 32,
        "semantics": semantics,
        "nvcc_version": version,
        "kernels": [kernel | changes],
    }
    (folder / "manifest.json").write_text('{"sha256": ""}\n' + json.dumps(data))


@pytest.fixture
def run(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Compares two trees, each of which builds one kernel of the given text, or none."""

    def run(
        base: str | None,
        new: str | None,
        recorded: Path | None = None,
        options: tuple[str, ...] = (),
        **changes: Any,
    ) -> tuple[int, str]:
        builds = iter(((base, {}), (new, changes)))

        def build(tree: Path, jobs: Any, cache: Path) -> None:
            text, changed = next(builds)
            if text is not None:
                write_library(cache, text, **changed)

        def main(*arguments: str) -> int:
            given = [*arguments, *options, "--set", CONFIG]
            monkeypatch.setattr(sys, "argv", ["same_ptx.py", *given])
            return tool.main()

        monkeypatch.setattr(tool, "build", build)
        # The machine code of these kernels, which no assembler takes.
        monkeypatch.setattr(tool, "code_digest", lambda ptx: "added" if "add.s32" in ptx else "")
        if recorded is None:
            return main("--base-tree", str(TREE)), capsys.readouterr().out
        assert main("--base-tree", str(TREE), "--write-base", str(recorded)) == 0
        assert capsys.readouterr().out.startswith("1 kernels of nvcc 13.0.1")
        return main("--base", str(recorded)), capsys.readouterr().out

    return run


def test_the_same_kernel_is_counted(run: Any) -> None:
    assert run(PTX, PTX.replace("%r3", "%r5")) == (0, "1 kernels, 1 the same, 0 not\n")


def test_a_difference_is_shown_with_the_figures_of_both(run: Any) -> None:
    status, out = run(PTX, PTX.replace("add.s32", "sub.s32"), code_bytes=3200, spill_load_bytes=8)
    assert status == 1
    assert f"{CONFIG} [plain] for sm_80: 2 lines differ, worse: instructions, spilled bytes" in out
    assert "base: 100 instructions, 168 registers, 0 bytes spilled, 3 CTAs an SM" in out
    assert "new:  200 instructions, 168 registers, 8 bytes spilled, 3 CTAs an SM" in out
    assert "-add.s32" in out
    assert "+sub.s32" in out


OTHER_PTX = PTX.replace("add.s32 %r4, %r3, 1;", "add.s32 %r4, 1, %r3;")


def test_the_same_machine_code_is_the_same_kernel(run: Any, tmp_path: Path) -> None:
    """Of a recorded base, too; not with other registers or spills."""
    assert run(PTX, OTHER_PTX) == (0, "1 kernels, 1 the same, 0 not\n")
    assert run(PTX, OTHER_PTX, registers=160)[0] == 1


def test_a_record_has_the_hash_of_machine_code(run: Any, tmp_path: Path) -> None:
    recorded = tmp_path / "base.json"
    assert run(PTX, OTHER_PTX, recorded) == (0, "1 kernels, 1 the same, 0 not\n")


def test_a_record_without_it_knows_the_text_alone(tool: ModuleType) -> None:
    key = (80, "plain", CONFIG)
    older = tool.Kernel("1", 100, 168, 0)
    newer = tool.Kernel("2", 100, 168, 0, code="added")
    (found,) = tool.differences({key: older}, {key: newer})
    assert not found.is_worse


@pytest.mark.parametrize(
    ("changes", "worse"),
    [
        ({}, ""),
        ({"registers": 161}, ""),  # of 168 that are handed out
        ({"registers": 168, "code_bytes": 1584}, ""),
        ({"code_bytes": 1616}, "instructions"),
        ({"registers": 169}, "registers, CTAs an SM"),
        ({"spill_store_bytes": 4}, "spilled bytes"),
    ],
)
def test_a_kernel_that_is_no_worse_passes_if_asked_for(
    run: Any, changes: dict[str, int], worse: str
) -> None:
    changed = PTX.replace("add.s32", "sub.s32")
    assert run(PTX, changed, **changes)[0] == 1
    status, out = run(PTX, changed, options=("--no-worse",), **changes)
    assert status == bool(worse)
    assert f"lines differ, {f'worse: {worse}' if worse else 'no worse'}\n" in out


def test_a_kernel_of_one_tree_is_never_no_worse(run: Any) -> None:
    assert run(PTX, None, options=("--no-worse",))[0] == 1


KERNEL = """\
.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 to)
{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [to];
    mov.u32 %r1, %tid.x;
    setp.gt.s32 %p1, %r1, 7;
    @%p1 bra END;
    add.s32 %r2, %r1, 1;
    st.global.u32 [%rd1], %r2;
END:
    ret;
}
"""


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("%r2", "%r3", True),
        ("END", "LABEL", True),
        ("kernel(", "other_name(", True),
        ("%r1, 1;", "1, %r1;", True),
        ("%r1, 1;", "%r1, 2;", False),
        ("%r1, 7;", "%r1, 8;", False),
        ("sm_80", "sm_90", False),
    ],
)
def test_machine_code_is_compared_whatever_names_are(
    tool: ModuleType, old: str, new: str, is_same: bool
) -> None:
    """By the real assembler."""
    assert old in KERNEL
    codes = tool.code_digest(KERNEL), tool.code_digest(KERNEL.replace(old, new))
    assert (codes[0] == codes[1]) is is_same


def test_ptx_that_cannot_be_assembled_is_an_error(tool: ModuleType) -> None:
    with pytest.raises(SystemExit, match="ptxas of a kernel for sm_80"):
        tool.code_digest(KERNEL.replace("add.s32", "add.nothing"))
    with pytest.raises(SystemExit, match="without a target"):
        tool.code_digest("ret;")


def test_a_kernel_of_one_tree_is_a_difference(run: Any) -> None:
    assert run(PTX, None)[0] == 1
    assert "only in the new tree" in run(None, PTX)[1]


def test_no_kernel_at_all_proves_nothing(run: Any) -> None:
    assert run(None, None)[0] == 1


def test_a_record_of_the_base_stands_for_it(run: Any, tmp_path: Path) -> None:
    recorded = tmp_path / "base.json"
    same = run(PTX, PTX.replace("%r3", "%r5"), recorded)
    assert same == (0, "1 kernels, 1 the same, 0 not\n")
    status, out = run(PTX, PTX.replace("add.s32", "sub.s32"), recorded, registers=160)
    assert status == 1
    assert f"{CONFIG} [plain] for sm_80: some lines differ" in out
    assert "base: 100 instructions, 168 registers, 0 bytes spilled" in out
    assert "new:  100 instructions, 160 registers, 0 bytes spilled" in out
    assert "only in the base tree" in run(PTX, None, recorded)[1]


def test_another_compiler_than_the_bases_is_refused(run: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"with nvcc 13\.0\.1, this tree with 13\.0\.2"):
        run(PTX, PTX, tmp_path / "base.json", nvcc_version="13.0.2")


def test_the_committed_record_is_of_what_ships(tool: ModuleType) -> None:
    """A hash that nothing is compared with would prove nothing."""
    base = tool.Compiled.read(TREE / "tools" / "ci" / "base_ptx.json")
    jobs = [tool.set_job("cover", "sm_80", "plain"), *tool.shipped_jobs()]
    wanted = {
        (int(job.arch.removeprefix("sm_")), job.semantics, form)
        for job in jobs
        for form in job.short_forms
    }
    assert set(base.kernels) == wanted


def test_what_ships_is_what_ranks_first(tool: ModuleType) -> None:
    jobs = tool.shipped_jobs()
    assert {job.arch for job in jobs} == {"sm_90"}
    assert len({(job.semantics, form) for job in jobs for form in job.short_forms}) > 40


def test_a_folder_that_is_no_tree_is_refused(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["same_ptx.py", "--base-tree", str(tmp_path)])
    with pytest.raises(SystemExit):
        tool.main()


def test_what_is_recorded_leads_to_the_newest_sources(tool: ModuleType) -> None:
    known = tool.recorded({}, {"a": "tree", "b": "tree"}, {"a": "a1", "b": "b1"})
    assert known == {"tree": {"a": "a1", "b": "b1"}}
    known = tool.recorded(known, {"a": "a1", "b": "b1"}, {"a": "a2", "b": "b1"})
    assert known == {"a1": {"a": "a2"}, "tree": {"a": "a2", "b": "b1"}}


def test_what_was_equivalent_to_the_base_is_to_the_new_sources(tool: ModuleType) -> None:
    known = {"old": {"a": "a1"}, "older": {"a": "a1", "b": "b1"}}
    assert tool.recorded(known, {"a": "old"}, {"a": "a2"}) == {
        "a1": {"a": "a2"},
        "old": {"a": "a2"},
        "older": {"a": "a2", "b": "b1"},
    }


OTHER = "(FP16, 64, 64, 32, 2wg): tma+stages_2+q_buffers_1+regs_24_240"
THIRD = OTHER.replace("64, 32", "64, 48")


def compiled(tool: ModuleType, name: str, digests: dict[str, str]) -> Any:
    """The kernels of a tree: hashes by short form, and sources that are called after the tree."""
    kernels = {
        (90, "plain", form): tool.Kernel(digest, 1, 1, 0) for form, digest in digests.items()
    }
    families = ("mma_sync", "wgmma")
    return tool.Compiled("13.0.1", {family: f"{name} {family}" for family in families}, kernels)


def test_a_family_is_unchanged_if_no_kernel_of_both_trees_differs(tool: ModuleType) -> None:
    base = compiled(tool, "base", {CONFIG: "1", OTHER: "2"})
    new = compiled(tool, "new", {CONFIG: "1", OTHER: "2", THIRD: "3"})
    assert tool.unchanged_families(base, new) == {"mma_sync": 1, "wgmma": 1}
    assert tool.unchanged_families(compiled(tool, "base", {OTHER: "2"}), new) == {"wgmma": 1}
    changed = compiled(tool, "base", {CONFIG: "1", OTHER: "2", THIRD: "4"})
    assert tool.unchanged_families(changed, new) == {"mma_sync": 1}


def test_families_that_did_not_change_are_recorded(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tool, "source_hash", lambda family: f"new {family}")
    monkeypatch.setattr(tool, "equivalent_sources", dict)
    monkeypatch.setattr(tool, "EQUIVALENT_SOURCES", tmp_path / "equivalent.json")
    base, new = tmp_path / "base.json", tmp_path / "new.json"
    compiled(tool, "base", {CONFIG: "1", OTHER: "2"}).write(base)
    compiled(tool, "new", {CONFIG: "changed", OTHER: "2", THIRD: "3"}).write(new)
    arguments = ["same_ptx.py", "--base", str(base), "--new", str(new), "--record"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert tool.main() == 1
    assert "recorded: wgmma (1 kernels)" in capsys.readouterr().out
    found = json.loads((tmp_path / "equivalent.json").read_text())
    assert found == {"base wgmma": {"wgmma": "new wgmma"}}


def test_a_file_of_other_sources_is_none_of_this_tree(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "new.json"
    compiled(tool, "old", {CONFIG: "1"}).write(file)
    monkeypatch.setattr(
        sys, "argv", ["same_ptx.py", "--base", str(file), "--new", str(file), "--set", CONFIG]
    )
    with pytest.raises(SystemExit, match="made from other sources of mma_sync than this tree's"):
        tool.main()


@pytest.mark.full
@pytest.mark.parametrize("changed", [False, True])
def test_a_tree_beside_a_copy_of_itself(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    changed: bool,
) -> None:
    """With other line numbers; and with a constant that a kernel has."""
    shutil.copytree(TREE / "src", tmp_path / "src")
    header = tmp_path / "src" / "flashsmith" / "csrc" / "common" / "softmax.cuh"
    text = "// One line more.\n" + header.read_text()
    header.write_text(text.replace("-3e38f", "-2e38f") if changed else text)
    monkeypatch.setattr(sys, "argv", ["same_ptx.py", "--base-tree", str(tmp_path), "--set", CONFIG])
    assert tool.main() == changed
    assert f"1 kernels, {int(not changed)} the same" in capsys.readouterr().out
