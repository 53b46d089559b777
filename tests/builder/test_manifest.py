"""The manifest survives a round trip, and no damage to its text goes unnoticed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import signal
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in_sources import CONFIGS
from synthetic_library import key_of, make_manifest, publish

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
    flags = dict.fromkeys(("softcap", "packed", "uneven", "partial"), False)
    assert data["semantics"] == {"mask": "none"} | flags


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


# ---- hand-written manifests ----


def signed(body: str) -> str:
    """A manifest's text whose checksum is right, whatever it says."""
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest()}) + "\n" + body + "\n"


DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5000
TEXTS = {
    "deep": signed(DEEP),
    "deep within": signed('{"format": 2, "kernels": ' + DEEP + "}"),
    "deep checksum": DEEP + "\n{}\n",
    "deep objects": signed('{"a":' * 50_000 + "1" + "}" * 50_000),
    "long number": signed(LONG),
    "long number within": signed('{"format": ' + LONG + "}"),
    "long checksum": LONG + "\n{}\n",
    "infinite": signed("Infinity"),
    "list": signed("[]"),
    "null": signed("null"),
    "empty": "",
    "surrogate": signed('{"format": 2, "key": "\\ud800"}'),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_text_is_damaged(name):
    with pytest.raises(ValueError, match=r"."):
        Manifest.from_json(TEXTS[name])


VALUES = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2**63,
        10**30,
        1.5,
        -0.5,
        math.inf,
        math.nan,
        "",
        "x",
        "\x1b[2J",
    ),
    *("a\nb", "\ud800", [], ["x"], [[]], {}, {"x": 1}, {"size": -1, "sha256": 5}, "9" * 5000),
    *("../../../etc/passwd", "/etc/passwd", "ptx/../../x", "window", "wgmma", [None] * 3),
]


def mutated(data: object, draw: random.Random) -> object:
    """The data with one value in it replaced, taken away or put in."""
    if isinstance(data, dict) and data and draw.random() < 0.9:
        name = draw.choice(list(data))
        kind = draw.random()
        if kind < 0.1:
            return {key: value for key, value in data.items() if key != name}
        if kind < 0.2:
            return {**data, draw.choice(["x", "", "../x", "key"]): draw.choice(VALUES)}
        return {**data, name: mutated(data[name], draw)}
    if isinstance(data, list) and data and draw.random() < 0.9:
        i = draw.randrange(len(data))
        return [*data[:i], mutated(data[i], draw), *data[i + 1 :]]
    return draw.choice(VALUES)


def check_mutated(manifest: Manifest, seed: int) -> None:
    """It is damaged, or one that can be used as any other."""
    draw = random.Random(seed)
    data = json.loads(manifest.to_json().split("\n", 1)[1])
    for _ in range(draw.choice((1, 1, 1, 3))):
        data = mutated(data, draw)
    text = signed(json.dumps(data, indent=1))
    try:
        read = Manifest.from_json(text)
    except ValueError as error:
        assert str(error)  # noqa: PT017
        return
    assert Manifest.from_json(read.to_json()) == read
    assert {kernel.ptx_file for kernel in read.kernels} <= read.files.keys()
    assert all(".." not in name and not name.startswith("/") for name in read.files)
    assert str(read.arch + sum(kernel.registers for kernel in read.kernels)).isdecimal()
    assert read.created.isprintable()


def test_random_manifests(manifest):
    for seed in range(500):
        check_mutated(manifest, seed)


@pytest.mark.full
def test_many_random_manifests(manifest):
    for seed in range(1000, 20_000):
        check_mutated(manifest, seed)


@pytest.fixture
def hurried():
    """A process that waits for a fifo's other end is woken, and fails."""

    def wake(number, frame):
        raise TimeoutError("it hangs")

    former = signal.signal(signal.SIGALRM, wake)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def put(kind: str, path: Path) -> None:
    """In place of a file: something that is none, or not the one that was there."""
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o644, os.makedev(1, 5))  # as /dev/zero: it never ends
        except PermissionError:
            path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        path.write_text(TEXTS[kind])


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "link", "loop", "large", *TEXTS])
def test_a_hostile_manifest_is_a_damaged_library(kind, cache, hurried):
    path = publish(cache, "a").path
    put(kind, path / "manifest.json")
    check_damaged(cache, "folder" in kind)


@pytest.mark.parametrize("kind", ["fifo", "device", "link", "loop"])
@pytest.mark.parametrize("name", ["library.so", "ptx", "lock"])
def test_a_hostile_file_is_a_damaged_library(kind, name, cache, hurried):
    path = publish(cache, "a").path / name
    put(kind, path if path.is_file() else sorted(path.iterdir())[0])
    if name == "lock":
        assert cache.open(key_of("a")) is None
        assert publish(cache, "a").so_path.is_file()
    else:
        check_damaged(cache, False)


def check_damaged(cache, foreign: bool) -> None:
    assert cache.open(key_of("a")) is None
    assert [entry.damage is not None for entry in cache.entries(thorough=True)] == (
        [] if foreign else [True]
    )
    if foreign:
        return  # a folder of that name is nothing that we made
    publish(cache, "a")
    assert cache.open(key_of("a")) is not None
    assert [entry.damage for entry in cache.entries(thorough=True)] == [None]
