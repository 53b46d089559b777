"""All the peers, and picking some by name."""

from __future__ import annotations

from flashsmith.benchmark.peers.flash_attn import FlashAttnPeer
from flashsmith.benchmark.peers.flex import FlexPeer
from flashsmith.benchmark.peers.peer import Peer
from flashsmith.benchmark.peers.torch_sdpa import SdpaPeer
from flashsmith.errors import ArgumentError

# PyTorch's own FlashAttention-2: what others are compared with.
YARDSTICK = "fa2"
_ALL: tuple[Peer, ...] = (
    SdpaPeer(YARDSTICK, "FLASH_ATTENTION", direct=True),
    SdpaPeer("cudnn", "CUDNN_ATTENTION"),
    SdpaPeer("mem_efficient", "EFFICIENT_ATTENTION"),
    FlexPeer(),
    FlashAttnPeer("flash_attn_2", ("flash_attn",), ("flash-attn",)),
    FlashAttnPeer(
        "flash_attn_3",
        ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
        ("flash-attn-3", "flash_attn_3"),
    ),
    FlashAttnPeer("flash_attn_4", ("flash_attn.cute",), ("flash-attn-4",)),
)
PEERS = {peer.name: peer for peer in _ALL}


def get_peers(names: str) -> tuple[Peer, ...]:
    """The peers of a comma-separated list, each once, in the order of PEERS; 'all' or 'none'.

    Raises ArgumentError for an unknown name; the message lists what is known.
    """
    wanted = {name.strip().replace("-", "_") for name in names.split(",") if name.strip()}
    if wanted == {"all"}:
        return _ALL
    if wanted == {"none"}:
        return ()
    unknown = sorted(wanted - set(PEERS))
    if unknown or not wanted:
        raise ArgumentError(
            f"peers={names!r}: {', '.join(unknown) or 'no name'}: allowed are "
            f"{', '.join(PEERS)} separated by commas, all, and none"
        )
    return tuple(peer for peer in _ALL if peer.name in wanted)
