"""Other people's attention, behind one small interface, so that ours is measured beside it.

A peer that is not installed, or that cannot serve a problem, says why: a named gap, no failure.
"""

from flashsmith.benchmark.peers.flash_attn import FlashAttnPeer
from flashsmith.benchmark.peers.flex import FlexPeer
from flashsmith.benchmark.peers.peer import Peer, PeerContender
from flashsmith.benchmark.peers.selection import PEERS, get_peers
from flashsmith.benchmark.peers.torch_sdpa import SdpaPeer

__all__ = [
    "PEERS",
    "FlashAttnPeer",
    "FlexPeer",
    "Peer",
    "PeerContender",
    "SdpaPeer",
    "get_peers",
]
