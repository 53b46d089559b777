"""The config set of the wgmma_dq family, and the candidate configs to use when there are no
measurements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from flashsmith.families.device import DeviceSpec, device_spec
from flashsmith.families.head_dims import HeadDims, HeadPair, is_whole
from flashsmith.families.legality import is_legal
from flashsmith.families.warpgroups import WARPGROUP_ROWS
from flashsmith.families.wgmma_dq.config import D_HEADS, WgmmaDqKernelConfig
from flashsmith.semantics.dtype import DType


class _QueryTile(NamedTuple):
    B_c: int
    n_warpgroups: int
    k_stages: int
    v_stages: int
    late_dq: bool
    pingpong: bool


# For each d_head, its tiles in order of preference.
_TILES: dict[HeadDims, tuple[_QueryTile, ...]] = {
    64: (_QueryTile(128, 2, 3, 3, True, True), _QueryTile(64, 3, 4, 4, True, True)),
    72: (_QueryTile(128, 2, 2, 2, True, True),),
    80: (_QueryTile(128, 2, 2, 2, True, True),),
    96: (_QueryTile(128, 2, 2, 2, True, True),),
    128: (_QueryTile(64, 2, 3, 3, True, True), _QueryTile(128, 2, 2, 2, False, False)),
    192: (_QueryTile(64, 2, 2, 2, True, True),),
    256: (_QueryTile(64, 2, 2, 1, True, True),),
    # These are the tiles of the wider of the two widths. None of these pairs was measured.
    HeadPair(64, 128): (_QueryTile(64, 2, 3, 3, True, True),),
    HeadPair(128, 64): (_QueryTile(64, 2, 3, 3, True, True),),
    HeadPair(192, 128): (_QueryTile(64, 2, 2, 2, True, True),),
    HeadPair(256, 128): (_QueryTile(64, 2, 2, 2, True, True),),
    HeadPair(256, 256): (_QueryTile(64, 2, 2, 1, True, True),),
}

# Other configs that were the fastest on the H200; proofs check them together with the candidates.
_ALSO_PROVEN: dict[HeadDims, _QueryTile] = {256: _QueryTile(64, 2, 2, 1, False, False)}


def registers(n_warpgroups: int) -> tuple[int, int]:
    """Returns the numbers of registers of a producer thread and of a consumer thread."""
    return (32, 160) if n_warpgroups == 3 else (24, 240)


def get_hopper_dq_configs(dtypes: Sequence[DType] = tuple(DType)) -> list[WgmmaDqKernelConfig]:
    """Returns the set 'hopper-dq': one or two configs for each dtype and each d_head except 72 and
    80."""
    device, d_heads = device_spec("H200"), filter(is_whole, D_HEADS)
    return [cfg for dtype, d in product(dtypes, d_heads) for cfg in candidates(dtype, d, device)]


def candidates(dtype: DType, d_head: HeadDims, device: DeviceSpec) -> list[WgmmaDqKernelConfig]:
    """Returns the legal candidates for d_head on a device, in order of preference."""
    made = (_config(dtype, d_head, tile) for tile in _TILES.get(d_head, ()))
    return [cfg for cfg in made if is_legal(cfg, device)]


def proof_configs(dtype: DType, d_head: HeadDims, device: DeviceSpec) -> list[WgmmaDqKernelConfig]:
    """The configs that proofs check: the candidates, and other configs that were the fastest."""
    found = candidates(dtype, d_head, device)
    if d_head in _ALSO_PROVEN:
        found.append(_config(dtype, d_head, _ALSO_PROVEN[d_head]))
    return found


def _config(dtype: DType, d_head: HeadDims, tile: _QueryTile) -> WgmmaDqKernelConfig:
    d_head, d_v = d_head if isinstance(d_head, HeadPair) else (d_head, 0)
    return WgmmaDqKernelConfig(
        dtype,
        d_head,
        WARPGROUP_ROWS * tile.n_warpgroups,
        tile.B_c,
        tile.n_warpgroups,
        tile.k_stages,
        tile.v_stages,
        *registers(tile.n_warpgroups),
        late_dq=tile.late_dq,
        pingpong=tile.pingpong,
        d_v=d_v,
    )
