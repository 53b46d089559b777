"""What `import flashsmith` offers, each name on first use."""

from __future__ import annotations

import importlib.metadata

import pytest

import flashsmith
from flashsmith import configs


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.torch] if name == "sdpa" else [])
        for name in flashsmith.__all__
        if name != "__version__"
    ],
)
def test_every_public_name_loads(name: str) -> None:
    assert callable(getattr(flashsmith, name))
    assert name in dir(flashsmith)


def test_the_names_of_configs_are_the_same_objects() -> None:
    shared = set(flashsmith.__all__) & set(configs.__all__)
    assert {"DType", "FlashForwardKernelConfig", "DeviceSpec"} <= shared
    assert all(getattr(flashsmith, name) is getattr(configs, name) for name in shared)


def test_the_version_is_the_installed_one() -> None:
    assert flashsmith.__version__ == importlib.metadata.version("flashsmith")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'flashsmith' has no attribute 'foward'"):
        flashsmith.foward  # noqa: B018
