"""Names that the docs have shown: they keep working, wherever the code behind them has moved."""

from __future__ import annotations

import importlib
import pickle

import pytest

import flashsmith
from flashsmith.families.earlier_names import EARLIER

DOCUMENTED = {
    "flashsmith": (
        "DType DeviceSpec FlashForwardKernelConfig Problem Semantics WgmmaForwardKernelConfig "
        "__version__ attention choose device_spec flash_attn_func flash_attn_varlen_func forward "
        "forward_timed get_kernel_configs parse_kernel_name_into_config plan_forward sdpa"
    ),
    "flashsmith.benchmark.contenders": "kernel_contender",
    "flashsmith.benchmark.implementations": "kernel_implementation",
    "flashsmith.benchmark.roofline": "intensity load_roofline",
    "flashsmith.benchmark.rows": "read_rows",
    "flashsmith.benchmark.timing": "ONE_BY_ONE measure",
    "flashsmith.benchmark.workload": "Workload",
    "flashsmith.configs": (
        "DEFAULT_DEVICE FAMILIES HOPPER_KNOB_VALUES HOPPER_RULES KNOB_VALUES KNOWN_DEVICES RULES "
        "SUPPORTED_D_HEADS BrokenRule DType DeviceSpec FlashForwardKernelConfig "
        "KernelConfig PingPong Problem Rule Schedule Semantics TileOrder "
        "broken_rules by_family check_legal compiled_d_head device_spec "
        "get_autotuning_kernel_configs get_cover_configs get_hopper_configs get_kernel_configs "
        "get_kernel_progression_configs get_kernels_to_build get_search_space_configs is_legal "
        "kernel_set_sizes legal_completions nearest_legal parse_kernel_name_into_config "
        "rule_bitmask rules_of should_autotune_config"
    ),
    "flashsmith.errors": "IllegalConfigError",
    "flashsmith.integrations.fallbacks": "fallback_count",
    "flashsmith.runtime": "count_launches forget_prepared_calls",
    "flashsmith.tuning": "forget_choices",
    "flashsmith.tuning.sweep": "search_space",
    "flashsmith.verify": "prove prove_problem",
}
NEED_TORCH = {"sdpa"}
NAMES = [
    pytest.param(module, name, marks=[pytest.mark.torch] if name in NEED_TORCH else [])
    for module, names in DOCUMENTED.items()
    for name in names.split()
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_name_that_the_docs_have_shown_works(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None


@pytest.mark.parametrize("name", EARLIER)
def test_earlier_names_of_classes_work_and_warn(name: str) -> None:
    renamed = EARLIER[name]
    now = getattr(flashsmith, renamed.name)
    for module in ("flashsmith", "flashsmith.families", "flashsmith.configs", renamed.module):
        with pytest.warns(DeprecationWarning, match=f"removed in 0.3.0: use {renamed.name}"):
            assert getattr(importlib.import_module(module), name) is now
    # A pickle that was written when the class had the earlier name.
    text = pickle.dumps(now, protocol=0).replace(renamed.name.encode(), name.encode())
    assert name.encode() in text
    with pytest.warns(DeprecationWarning, match=renamed.name):
        assert pickle.loads(text) is now


def test_other_names_are_unknown() -> None:
    for module in ("flashsmith", "flashsmith.families", "flashsmith.configs"):
        with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Hopper'"):
            importlib.import_module(module).Hopper  # noqa: B018


def test_no_public_name_has_gone() -> None:
    assert set(DOCUMENTED["flashsmith"].split()) <= set(flashsmith.__all__)


@pytest.mark.torch
@pytest.mark.parametrize("module", ["torch_ops", "transformers"])
def test_modules_that_the_docs_have_shown(module: str) -> None:
    if module == "transformers":
        pytest.importorskip("transformers", reason="needs transformers: it is not installed")
    assert importlib.import_module(f"flashsmith.integrations.{module}")
