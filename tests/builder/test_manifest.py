"""The manifest survives a round trip, and no damage to its text goes unnoticed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in_sources import CONFIGS
from synthetic_library import make_manifest

from flashsmith.builder.manifest import FORMAT, FileRecord, Manifest


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Manifest:
    folder = tmp_path_factory.mktemp("library")
    (folder / "library.so").write_bytes(b"code")
    (folder / "ptx").mkdir()
    for cfg in CONFIGS:
        (folder / "ptx" / f"{cfg.kernel_name()}.ptx").write_text("text")
    return make_manifest("f" * 32, folder)


def test_round_trip(manifest):
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.files["library.so"] == FileRecord.of_bytes(b"code")


def test_it_is_json_a_person_can_read(manifest):
    data = json.loads(manifest.to_json().split("\n", 1)[1])
    assert data["kernels"][0]["short_form"] == "(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles"
    assert data["semantics"] == {"mask": "none", "softcap": False, "packed": False, "uneven": False}


def test_every_flipped_bit_is_noticed(manifest):
    text = bytearray(manifest.to_json().encode())
    for position in range(0, len(text), 7):
        for bit in (0, 5):
            text[position] ^= 1 << bit
            with pytest.raises(ValueError, match=r".") as caught:
                Manifest.from_json(bytes(text).decode(errors="replace"))
            assert str(caught.value)
            text[position] ^= 1 << bit


@given(st.data())
def test_every_truncation_is_noticed(manifest, data):
    text = manifest.to_json()
    end = data.draw(st.integers(0, len(text) - 2))
    with pytest.raises(ValueError, match=r"."):
        Manifest.from_json(text[:end])


def test_another_format_is_refused(manifest, monkeypatch):
    text = manifest.to_json()
    monkeypatch.setattr("flashsmith.builder.manifest.FORMAT", FORMAT + 1)
    with pytest.raises(ValueError, match="another format"):
        Manifest.from_json(text)


def test_spills(manifest):
    assert [kernel.spills for kernel in manifest.kernels] == [False, True]
