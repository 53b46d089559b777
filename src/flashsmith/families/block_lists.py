"""The kernels that write lists of the blocks in which a program's mask leaves at least one key
visible.

See csrc/common/block_lists.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashsmith.semantics.compiled import Semantics


def has_lists(semantics: Semantics) -> bool:
    """Whether kernels of these semantics visit only the blocks that such lists name."""
    program = semantics.caller_program
    return program is not None and program.mask is not None


def list_templates(semantics: Semantics, prefix: str) -> Mapping[str, str]:
    """The templates of the kernels that write the lists, keyed by the kernels' roles; empty if the
    semantics need no lists."""
    if not has_lists(semantics):
        return {}
    return {
        "list_blocks": f"{prefix}_list_blocks_kernel",
        "compact_lists": f"{prefix}_compact_lists_kernel",
    }


def query_list_templates(semantics: Semantics) -> Mapping[str, str]:
    """The templates of the kernels that write lists, for a backward pass in which each block of
    keys visits blocks of queries."""
    return _of_backward_pass(semantics, "queries")


def key_list_templates(semantics: Semantics) -> Mapping[str, str]:
    """The templates of the kernels that write lists, for a backward pass in which each block of
    queries visits blocks of keys."""
    return _of_backward_pass(semantics, "keys")


def _of_backward_pass(semantics: Semantics, what: str) -> Mapping[str, str]:
    if not has_lists(semantics):
        return {}
    kinds = ("list", "compact")
    return {f"{kind}_{what}": f"backward_{kind}_{what}_kernel" for kind in kinds}
