"""Launches of wgmma kernels: the tensor maps that reach the kernel, and when the driver is asked
for them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from forward_calls import ForwardCall
from hopper_plans import CONFIGS, DYNAMIC, MMA_SYNC, OF_D_HEAD, K, O, Q, V, call, semantics_of
from pretended_library import PretendedLibrary, TensorMap, replaced

MAPS_AT = (0, 128, 256, 384)
STREAM = 7
PLACES = (Q, K, V, O)
OUT_OF_MEMORY = 2  # as cudaError_t
NOT_FOUND = 500  # as CUresult


def prepare(
    library: PretendedLibrary, a_call: ForwardCall, ordinal: int = 0
) -> Callable[..., float | None]:
    library.compute(semantics_of(a_call, DYNAMIC))
    return library.prepare(DYNAMIC, a_call, ordinal)


def last_maps(library: PretendedLibrary) -> list[TensorMap]:
    arguments = bytes(library.last_launch().arguments)
    return [TensorMap.read(arguments, at) for at in MAPS_AT]


@pytest.mark.parametrize(
    "text", ["b2 s1536 h16:4 d128 fp16", "b2 s1000:3000 h16:4 d128 fp16 causal packed"]
)
def test_a_launch_is_what_was_planned(library: PretendedLibrary, text: str) -> None:
    a_call = call(text)
    launch = prepare(library, a_call)
    planned = library.plan(DYNAMIC, a_call)
    offsets = (*(0, 0, 0), *(5 << 40, 6 << 40)) if a_call.problem.semantics.packed else ()
    launch(STREAM, *PLACES, *offsets)
    (launched,) = library.launches()
    assert (tuple(launched.grid), tuple(launched.block)) == (planned.grid, planned.block)
    assert tuple(launched.cluster) == planned.cluster
    assert (launched.smem_bytes, launched.stream) == (planned.smem_bytes, STREAM)
    assert launched.kernel == 0x1000 + CONFIGS.index(DYNAMIC)
    for found, spec in zip(last_maps(library), planned.tensor_maps, strict=True):
        assert found == TensorMap(
            spec.address, spec.swizzle_bytes, spec.sizes, spec.strides_bytes, spec.box
        )


def test_a_thread_that_has_not_called_cuda_yet(library: PretendedLibrary) -> None:
    """The driver encodes no map without a context, where a runtime call would get one."""
    launch = prepare(library, call())
    library.leave_context()
    launch(STREAM, *PLACES)
    assert [found.address for found in last_maps(library)] == list(PLACES)
    assert library.count("cudaSetDevice") == 1


def test_maps_are_of_the_tensors_of_each_launch(library: PretendedLibrary) -> None:
    launch = prepare(library, call())
    for moved in range(5):
        places = tuple(place + moved * 4096 for place in PLACES)
        launch(STREAM, *places)
        assert [found.address for found in last_maps(library)] == list(places)
        assert last_maps(library)[1].box == (64, 128, 1, 1)


def test_the_driver_is_asked_once_for_each_address(library: PretendedLibrary) -> None:
    launch = prepare(library, call())
    assert library.count("cuTensorMapEncodeTiled") == 0
    for _ in range(3):
        launch(STREAM, *PLACES)
    assert library.count("cuTensorMapEncodeTiled") == 4
    launch(STREAM, Q, K, V, O + 4096)
    assert library.count("cuTensorMapEncodeTiled") == 5
    assert library.count("cudaFuncSetAttribute") == 1


def test_what_is_remembered_is_bounded(library: PretendedLibrary) -> None:
    """64 addresses of each tensor; a few that recur are not encoded again after many others."""
    launch = prepare(library, call())

    def encoded_by(outputs: range) -> int:
        before = library.count("cuTensorMapEncodeTiled")
        for place in outputs:
            launch(STREAM, Q, K, V, O + place * 4096)
            assert last_maps(library)[3].address == O + place * 4096
        return library.count("cuTensorMapEncodeTiled") - before

    assert encoded_by(range(64)) == 3 + 64
    assert encoded_by(range(64)) == 0
    assert encoded_by(range(64, 256)) == 192
    assert encoded_by(range(20)) == 20, "those from before are forgotten"
    assert encoded_by(range(20)) == 0


def test_threads_get_maps_of_their_own_tensors(library: PretendedLibrary) -> None:
    launch = prepare(library, call())
    sent: list[tuple[int, ...]] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            places = tuple(place + 4096 * rng.randrange(100) for place in PLACES)
            sent.append(places)
            launch(seed, *places)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arguments = [bytes(launched.arguments) for launched in library.launches()]
    arrived = [tuple(TensorMap.read(a, at).address for at in MAPS_AT) for a in arguments]
    assert sorted(arrived) == sorted(sent)
    assert len(arrived) == 6 * 150


def test_every_map_of_every_head_dimension_is_to_the_drivers_liking(
    library: PretendedLibrary,
) -> None:
    for d_head, cfg in OF_D_HEAD.items():
        for text in (f"b2 s77:333 h6:2 d{d_head - 8} fp16", f"b3 s77:5 h4 d{d_head} fp16 packed"):
            a_call = call(text)
            library.compute(semantics_of(a_call, cfg))
            offsets = (0, 0, 0, 16, 16) if a_call.problem.semantics.packed else ()
            library.prepare(cfg, a_call)(STREAM, *PLACES, *offsets)
            assert last_maps(library)[0].sizes[0] == a_call.problem.d


def test_the_other_family_asks_for_none(library: PretendedLibrary) -> None:
    a_call = call("b1 s1024 h2 d128 fp16")
    library.compute(a_call.problem.semantics)
    library.prepare(MMA_SYNC, a_call)(STREAM, *PLACES)
    assert len(library.launches()) == 1
    assert library.count("cuTensorMapEncodeTiled") == library.count("cudaStreamGetId") == 0


def test_a_refusal_names_the_tensor_and_what_was_wanted(library: PretendedLibrary) -> None:
    launch = prepare(library, call("b2 s1536 h16:4 d128 fp16"))
    launch(STREAM, *PLACES)
    for place, name, sizes, strides in (
        ((Q + 8, K, V, O), f"q at {Q + 8:#x}", "128 x 1536 x 16 x 2", "4096 x 256 x 6291456"),
        ((Q, K, V + 2, O), f"v at {V + 2:#x}", "128 x 1536 x 4 x 2", "1024 x 256 x 1572864"),
    ):
        with pytest.raises(RuntimeError) as caught:
            launch(STREAM, *place)
        box = "64 x 64 x 1 x 1" if name.startswith("q") else "64 x 128 x 1 x 1"
        assert (
            f"cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE: {name}, {sizes} elements with "
            f"strides of {strides} bytes, box {box}, swizzle 128 bytes"
        ) in str(caught.value)
    launch(STREAM, *PLACES)
    assert len(library.launches()) == 2, "what is refused is not launched, nor what follows ill"


def test_a_status_without_a_name_is_told_by_number(library: PretendedLibrary) -> None:
    launch = prepare(library, call())
    library.fail("cuTensorMapEncodeTiled", 999)
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled: error 999: q at 0x"):
        launch(STREAM, *PLACES)


def test_a_driver_without_tensor_maps(fresh_library: Callable[[], PretendedLibrary]) -> None:
    """It may be asked again: a failure is not remembered."""
    library = fresh_library()
    launch = prepare(library, call())
    library.fail("finding cuTensorMapEncodeTiled", NOT_FOUND)
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled: the driver does not have it"):
        launch(STREAM, *PLACES)
    launch(STREAM, *PLACES)
    assert len(library.launches()) == 1


def test_a_refused_launch_says_why(library: PretendedLibrary) -> None:
    launch = prepare(library, call())
    library.fail("cudaLaunchKernel", OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="cudaLaunchKernel: cudaErrorMemoryAllocation: as"):
        launch(STREAM, *PLACES)


def test_no_rows_no_launch(library: PretendedLibrary) -> None:
    a_call = replaced(call("b2 s0:128 h4 d128 fp16"))
    prepare(library, a_call)(STREAM, 0, K, V, 0)
    assert library.launches() == []


def test_a_launch_is_on_its_own_device(library: PretendedLibrary) -> None:
    library.reset(devices=2)
    launch = prepare(library, call(), ordinal=1)
    launch(STREAM, *PLACES)
    assert library.launches()[0].device == 1
    assert library.cuda.pretended_current_device() == 0
    with pytest.raises(RuntimeError, match="cudaSetDevice"):
        prepare(library, call(), ordinal=2)(STREAM, *PLACES)
    assert library.cuda.pretended_current_device() == 0
