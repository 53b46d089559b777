"""Problem and DeviceSpec: their checks and their text forms."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from config_samples import any_semantics
from hypothesis import given
from hypothesis import strategies as st

from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DEFAULT_DEVICE,
    KNOWN_DEVICES,
    DeviceSpec,
    DType,
    FlashForwardKernelConfig,
    Problem,
    Semantics,
    device_spec,
)
from flashsmith.semantics import UNLIMITED
from flashsmith.semantics.sizes import window_class

PROBLEM = Problem(2, 128, 256, 8, 2, 64, DType.FP16)


def test_problem_holds_sizes_dtype_and_neutral_semantics() -> None:
    assert PROBLEM.semantics == Semantics("none", False, False, False)
    assert PROBLEM.attn_flop() == 4 * 2 * 8 * 128 * 256 * 64
    assert Problem(1, 1, 1, 1, 1, 8, "bf16").dtype is DType.BF16  # type: ignore[arg-type]
    assert len({PROBLEM, Problem(2, 128, 256, 8, 2, 64, DType.FP16)}) == 1


@pytest.mark.parametrize("name", ["batch", "seq_q", "seq_k", "heads_q", "heads_k", "d"])
@pytest.mark.parametrize("value", [-1, 1.5, True, None, "64"])
def test_problem_refuses_a_size_by_name(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}={value!r}: give a whole number, at least"):
        replace(PROBLEM, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["heads_q", "heads_k", "d"])
def test_heads_and_d_may_not_be_none(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}=0: give a whole number, at least 1"):
        replace(PROBLEM, **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["batch", "seq_q", "seq_k"])
def test_a_batch_and_its_sequences_may_be_empty(name: str) -> None:
    assert replace(PROBLEM, **{name: 0}).attn_flop() == 0  # type: ignore[arg-type]


def test_problem_refuses_heads_that_do_not_group() -> None:
    with pytest.raises(ArgumentError, match="heads_q=6: must be a multiple of heads_k=4"):
        Problem(1, 64, 64, 6, 4, 64, DType.FP16)


def test_causal_counts_half() -> None:
    causal = replace(PROBLEM, semantics=Semantics("causal"))
    assert causal.attn_flop() * 2 == PROBLEM.attn_flop()


CFG = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4)


@pytest.mark.parametrize(
    ("changes", "uneven"),
    [
        ({}, False),
        ({"seq_q": 0}, False),
        ({"seq_k": 0}, True),
        ({"seq_q": 96}, True),
        ({"seq_k": 96}, False),
        ({"seq_k": 80}, True),
        ({"d": 56}, True),
        ({"semantics": Semantics(uneven=True)}, True),
    ],
)
def test_tiles_that_are_not_filled_need_an_uneven_kernel(
    changes: dict[str, object], uneven: bool
) -> None:
    problem = replace(PROBLEM, **changes)  # type: ignore[arg-type]
    assert problem.required_semantics(CFG) == Semantics(uneven=uneven)
    capped = replace(problem, semantics=replace(problem.semantics, mask="causal", softcap=True))
    assert capped.required_semantics(CFG) == Semantics("causal", softcap=True, uneven=uneven)


def test_problem_parse() -> None:
    assert Problem.parse("b2 s128:256 h8:2 d64 fp16") == PROBLEM
    assert str(PROBLEM) == "b2 s128:256 h8:2 d64 fp16"
    assert Problem.parse("BF16 D128 S512") == Problem(1, 512, 512, 1, 1, 128, DType.BF16)
    packed = replace(PROBLEM, semantics=Semantics("causal", packed=True, uneven=True))
    assert Problem.parse("causal b2 s128:256 packed h8:2 d64 fp16") == packed
    assert Problem.parse("b2 s128:256 h8:2 d64 fp16 uneven+causal+packed") == packed
    assert str(packed) == "b2 s128:256 h8:2 d64 fp16 causal packed uneven"
    assert Problem.parse("b2 s128:256 h8:2 d64 fp16 plain") == PROBLEM


_size = st.integers(1, 1 << 20)
_length = st.integers(0, 1 << 20)


@given(
    *(_length, _length, _length, _size, st.integers(1, 64), _size),
    st.sampled_from(DType),
    any_semantics,
)
def test_problem_text_and_parse_are_inverses(
    batch: int,
    seq_q: int,
    seq_k: int,
    heads_k: int,
    group: int,
    d: int,
    dtype: DType,
    semantics: Semantics,
) -> None:
    problem = Problem(batch, seq_q, seq_k, heads_k * group, heads_k, d, dtype, semantics)
    assert Problem.parse(str(problem)) == problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "s, d, dtype missing"),
        ("s128 fp16", "d missing"),
        ("s128 d64", "dtype missing"),
        ("s128 s256 d64 fp16", "'s256' repeats s"),
        ("s128 d64 fp16 bf16", "'bf16' repeats dtype"),
        ("s128 b2:3 d64 fp16", "unknown word 'b2:3'"),
        ("s128 d64 nonsense", "problem='s128 d64 nonsense': unknown word 'nonsense'"),
        (f"s{'9' * 5000} d64 fp16", "has more than 18 digits"),
        ("s128 d64 fp16 x3", "unknown word 'x3'"),
        ("s128 d64 fp16 casual", "unknown word 'casual'; did you mean 'causal'?"),
        ("s128 d64 fp16 causal+uneaven", "unknown word 'uneaven'; did you mean 'uneven'?"),
        ("s128 d64 pf16", "unknown word 'pf16'; did you mean 'fp16'?"),
        ("s64 d0 fp16", "d=0"),
        ("s64 d64 fp16 causal window", "semantics='causal+window'"),
        ("s64 d64 fp16 causal causal", "semantics='causal+causal'"),
    ],
)
def test_problem_parse_names_the_mistake(text: str, problem: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(problem)):
        Problem.parse(text)


def test_what_stands_for_a_window_and_a_cap() -> None:
    assert (PROBLEM.window, PROBLEM.softcap) == (None, 0.0)
    long, short = (Problem.parse(f"s{seq} d64 fp16 window softcap") for seq in (4096, 1000))
    assert (long.window, short.window) == ((1024, 0), (500, 0))
    assert long.softcap == 30.0


@given(st.integers(0, 70), st.integers(0, 70))
def test_the_flop_of_a_window_are_those_of_the_keys_in_it(seq_q: int, seq_k: int) -> None:
    problem = Problem(1, seq_q, seq_k, 1, 1, 8, DType.FP16, Semantics("window"))
    assert problem.window is not None
    left, _ = problem.window
    positions = range(seq_k - seq_q, seq_k)
    seen = sum(key in range(p - left, p + 1) for p in positions for key in range(seq_k))
    assert problem.attn_flop() == 4 * 8 * seen


# --- devices -------------------------------------------------------------------------------------

SMEM = {80: (166912, 167936), 86: (101376, 102400), 90: (232448, 233472)}
SMEM |= {89: SMEM[86], 120: SMEM[86], 100: SMEM[90], 103: SMEM[90]}


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda device: device.name)
def test_known_devices(device: DeviceSpec) -> None:
    assert (device.max_smem_per_block, device.max_smem_per_sm) == SMEM[device.arch]
    # One CTA leaves 1 KiB of the SM to the system.
    assert device.max_smem_per_sm - device.max_smem_per_block == 1024
    assert device.registers_per_sm == 65536
    assert device_spec(device.name) == device_spec(device.name.upper()) == device


def test_the_gpus_of_the_list() -> None:
    assert {(device.name, device.arch, device.sm_count) for device in KNOWN_DEVICES} == {
        ("A100", 80, 108),
        ("A10", 86, 72),
        ("A10G", 86, 80),
        ("RTX 3090", 86, 82),
        ("L4", 89, 58),
        ("L40S", 89, 142),
        ("RTX 6000 Ada", 89, 142),
        ("RTX 4090", 89, 128),
        ("H100", 90, 132),
        ("H200", 90, 132),
        ("GH200", 90, 132),
        ("H20", 90, 78),
        ("B200", 100, 148),
        ("B300", 103, 148),
        ("RTX 5090", 120, 170),
        ("RTX PRO 6000 Blackwell", 120, 188),
    }
    assert DEFAULT_DEVICE.name == "A100"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (80, "A100"),
        ("80", "A100"),
        ("sm_80", "A100"),
        ("SM80", "A100"),
        ("a100", "A100"),
        (86, "A10"),
        (90, "H100"),
        ("sm_90a", "H100"),
        ("h200", "H200"),
        ("rtx4090", "RTX 4090"),
        ("RTX-4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("sm_120", "RTX 5090"),
        (89, "L4"),
        ("l40s", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("rtx 6000 ada", "RTX 6000 Ada"),
        ("gh200", "GH200"),
        ("H20", "H20"),
        ("sm_103", "B300"),
        ("NVIDIA RTX PRO 6000 Blackwell", "RTX PRO 6000 Blackwell"),
        # As nvidia-smi, clouds and schedulers write them.
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("H100-SXM5-80GB", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("A100-80GB", "A100"),
        ("nvidia-a100-80gb", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
    ],
)
def test_device_spec_by_name_or_arch(key: str | int, name: str) -> None:
    assert device_spec(key).name == name


@pytest.mark.parametrize("key", ["", "V100", 75, "sm_90b", None])
def test_an_unknown_device_is_answered_with_the_known_ones(key: object) -> None:
    with pytest.raises(ArgumentError, match=r"known are A100 \(sm_80\), .*RTX 5090 \(sm_120\)"):
        device_spec(key)  # type: ignore[arg-type]


def test_a_board_with_fewer_sms_has_its_own_limits() -> None:
    assert (device_spec("H100 PCIe").sm_count, device_spec("H100").sm_count) == (114, 132)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Tesla T4", "is of sm_75, older than sm_80"),
        ("T4", "is of sm_75, older than sm_80"),
        ("V100", "is of sm_70, older than sm_80"),
        ("Tesla V100-SXM2-16GB", "is of sm_70, older than sm_80"),
        ("NVIDIA GeForce RTX 2080 Ti", "is of sm_75, older than sm_80"),
        ("Tesla P100-PCIE-16GB", "is of sm_60, older than sm_80"),
        ("Quadro RTX 8000", "is of sm_75, older than sm_80"),
        ("MI300X", "is AMD's"),
        ("AMD Instinct MI250X", "is AMD's"),
        ("Gaudi2", "is Intel's"),
        ("Apple M3 Max", "is Apple's"),
        ("TPU v5e", "is Google's"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "is a part of a GPU"),
    ],
)
def test_what_no_kernel_runs_on_is_said_plainly(name: str, why: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        device_spec(name)
    message = str(caught.value)
    assert message.startswith(f"device='{name}': it {why}")
    assert "did you mean" not in message


@pytest.mark.parametrize("name", ["RTX 2000 Ada", "RTX 4090 Laptop GPU", "L40", "M7"])
def test_what_is_not_known_is_taken_for_nothing_else(name: str) -> None:
    with pytest.raises(ArgumentError, match="no known GPU is called that"):
        device_spec(name)


@pytest.mark.parametrize(("arch", "relative"), [(87, "A10"), ("sm_121", "RTX 5090")])
def test_an_unlisted_architecture_has_its_older_relatives_limits(
    arch: int | str, relative: str
) -> None:
    known, spec = device_spec(relative), device_spec(arch)
    assert spec.arch == int(str(arch).removeprefix("sm_"))
    assert (spec.max_smem_per_block, spec.sm_count) == (known.max_smem_per_block, known.sm_count)
    assert relative in spec.name


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("sm_110", "arch='sm_110': no known GPU has it or is an older one of its generation"),
        (110, "arch=110: no known GPU has it or is an older one of its generation"),
        ("sm_75", "arch='sm_75': older than sm_80, the oldest that the kernels support"),
        ("RTX 4070", "device='RTX 4070': no known GPU is called that; did you mean 'RTX 4090'?"),
        ("L40X", "device='L40X': no known GPU is called that; did you mean 'L40S'?"),
    ],
)
def test_an_error_names_the_mistake_in_a_device(key: str | int, problem: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(problem)):
        device_spec(key)


def test_advice_is_only_given_where_it_helps() -> None:
    # Nothing can be built for a generation without limits: a DeviceSpec would not help.
    with pytest.raises(ArgumentError) as unknown:
        device_spec("sm_110")
    assert "DeviceSpec" not in str(unknown.value)


def test_a_windows_class_is_part_of_a_problem() -> None:
    text = "b2 s128:512 h8 d64 fp16 window_4096+packed+uneven"
    problem = Problem.parse("b2 s128:512 h8 d64 fp16 packed window_4096")
    assert (str(problem), problem.window_keys) == (text.replace("+", " "), 4096)
    assert Problem.parse(text) == problem != replace(problem, window_keys=64)
    assert problem.window == (4096, 0)
    # Any window: what older tables and texts have.
    old = Problem.parse("b2 s128:512 h8 d64 fp16 window")
    assert (str(old), old.window_keys, old.window) == (
        "b2 s128:512 h8 d64 fp16 window",
        0,
        (256, 0),
    )
    limits = [(4095, 0), (4096, 0), (2048, 2048), (5, 0), (0, 0), (UNLIMITED, 3), (9000, 0)]
    assert [window_class(*it) for it in limits] == [4096, 4096, 4096, 64, 64, 0, 8192]
    for word, why in (
        ("window_100", "give a power of two from 64"),
        ("window_32", "give a power of two from 64"),
        ("window_0", "give one, such as window_4096"),
        ("window_64 window_128", "give one, such as window_4096"),
        ("window_64 causal", "or a mask"),
    ):
        with pytest.raises(ArgumentError, match=why):
            Problem.parse(f"s128 d64 fp16 {word}")
    with pytest.raises(ArgumentError, match="the mask is 'causal', which has no window"):
        replace(problem, semantics=Semantics("causal"))
    for keys in (-64, 64.0, True, "64"):
        with pytest.raises(ArgumentError, match="give a power of two"):
            replace(problem, window_keys=keys)  # type: ignore[arg-type]
