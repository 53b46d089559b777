"""Kernels that write lists of K/V blocks for the mask of a program.

See csrc/common/block_lists.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashsmith.semantics.compiled import Semantics


def has_lists(semantics: Semantics) -> bool:
    """Whether kernels of these semantics visit the blocks of lists."""
    program = semantics.caller_program
    return program is not None and program.mask is not None


def list_templates(semantics: Semantics, prefix: str) -> Mapping[str, str]:
    """The templates of the kernels that write lists, by role; none for kernels without lists."""
    if not has_lists(semantics):
        return {}
    return {
        "list_blocks": f"{prefix}_list_blocks_kernel",
        "compact_lists": f"{prefix}_compact_lists_kernel",
    }
