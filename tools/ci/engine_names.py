#!/usr/bin/env python3
"""Whether releases of vLLM and SGLang have the names that the integrations take from them.

    python tools/ci/engine_names.py vllm FOLDER...      # each holds a release's package `vllm`
    python tools/ci/engine_names.py sglang FOLDER...

Sources are parsed and not imported, so that a release needs no dependencies: an unpacked wheel is
enough. An import within `try` may fail if its handler's imports exist. The exit status is 1 if a
name is missing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

INTEGRATIONS = Path(__file__).parents[2] / "src" / "flashsmith" / "integrations"
# Members of the engines' classes and settings that the integrations read or that the engine calls,
# as (module, class) or (module, function): names of members or of parameters.
MEMBERS = {
    ("vllm.v1.attention.backend", "CommonAttentionMetadata"): (
        *("query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens"),
        *("max_query_len", "block_table_tensor", "slot_mapping", "causal"),
        "seq_lens_cpu_upper_bound",
    ),
    ("vllm.v1.attention.backends.registry", "AttentionBackendEnum"): ("CUSTOM", "is_overridden"),
    ("sglang.srt.model_executor.forward_batch_info", "ForwardMode"): (
        *("is_decode_or_idle", "is_target_verify"),
    ),
    ("sglang.srt.model_executor.forward_batch_info", "ForwardBatch"): (
        *("forward_mode", "batch_size", "req_pool_indices", "seq_lens", "seq_lens_cpu"),
        *("out_cache_loc", "extend_seq_lens", "extend_seq_lens_cpu", "spec_info"),
    ),
    ("sglang.srt.mem_cache.memory_pool", "KVWriteLoc"): ("loc", "swa_loc", "full_loc"),
    ("sglang.srt.layers.radix_attention", "RadixAttention"): ("k_scale", "v_scale"),
    ("sglang.srt.speculative.draft_utils", "DraftBackendFactory"): (
        *("create_decode_backend", "create_draft_extend_backend", "_create_backend"),
    ),
    ("sglang.srt.plugins.hook_registry", "HookRegistry"): ("register",),
    ("sglang.srt.mem_cache.memory_pool", "MLATokenToKVPool"): ("get_key_buffer", "set_kv_buffer"),
    ("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend"): (
        *("init_forward_metadata", "init_forward_metadata_out_graph", "init_cuda_graph_state"),
        *("get_cuda_graph_seq_len_fill_value", "forward_extend", "forward_decode"),
    ),
}


# Names that a release needs only if it has the member that uses them: (module, class, member).
USED_BY = {
    ("vllm.v1.attention.backends.utils", "get_kv_cache_layout"): (
        *("vllm.v1.attention.backend", "AttentionBackend", "get_kv_cache_stride_order"),
    ),
}
Name = tuple[str, str]  # module and name


def imports(engine: str, nodes: list[ast.stmt]) -> Iterator[list[list[Name]]]:
    """Of each import from an engine, also within functions, what can serve it: lists of names, of
    which a release must have one list."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            if str(node.module).split(".")[0] == engine:
                yield [[(str(node.module), alias.name) for alias in node.names]]
        elif isinstance(node, ast.Try) and any(imports(engine, node.body)):
            handlers = [handler.body for handler in node.handlers]
            choices = [[*imports(engine, body)] for body in (node.body, *handlers)]
            yield [[name for (names,) in one for name in names] for one in choices]
        else:
            yield from imports(engine, [it for it in ast.iter_child_nodes(node) if _has_body(it)])


def _has_body(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt | ast.ExceptHandler)


def taken(engine: str) -> Iterator[list[list[Name]]]:
    """As ``imports``, of an engine's integration."""
    for path in sorted((INTEGRATIONS / engine).glob("*.py")):
        yield from imports(engine, ast.parse(path.read_text()).body)


def source_of(root: Path, module: str) -> ast.Module | None:
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return ast.parse(path.read_text())
    return None


def defined(body: list[ast.stmt]) -> Iterator[str]:
    """The names that statements define, also within `if` and `try`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (it.id for it in ast.walk(node) if isinstance(it, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.If | ast.Try | ast.With):
            inner = [it for it in ast.iter_child_nodes(node) if isinstance(it, ast.stmt)]
            handlers = getattr(node, "handlers", [])
            yield from defined(inner + [it for handler in handlers for it in handler.body])


def has(root: Path, module: str, name: str) -> bool:
    source = source_of(root, module)
    is_submodule = source_of(root, f"{module}.{name}") is not None
    return is_submodule or (source is not None and name in defined(source.body))


def is_served(root: Path, name: Name) -> bool:
    user = USED_BY.get(name)
    if user is not None and user[2] not in members(root, *user[:2]):
        return True
    return has(root, *name)


def members(root: Path, module: str, name: str) -> set[str]:
    """The names that a class and its bases in the same module define; attributes set on `self`
    count."""
    source = source_of(root, module)
    classes = {it.name: it for it in source.body if isinstance(it, ast.ClassDef)} if source else {}
    found: set[str] = set()
    todo = [name]
    while todo:
        one = classes.get(todo.pop())
        if one is None:
            continue
        found |= set(defined(one.body))
        found |= {it.attr for it in ast.walk(one) if isinstance(it, ast.Attribute)}
        todo += [base.id for base in one.bases if isinstance(base, ast.Name)]
    return found


def missing(engine: str, root: Path) -> list[str]:
    """What a release lacks, as sentences."""
    lacks = []
    for choices in taken(engine):
        wrong = [[it for it in names if not is_served(root, it)] for names in choices]
        if all(wrong):
            lacks += [f"{module} has no {name}" for module, name in wrong[0]]
    for (module, name), wanted in MEMBERS.items():
        if module.split(".")[0] == engine:
            known = members(root, module, name)
            lacks += [f"{module}.{name} has no {it}" for it in wanted if it not in known]
    return lacks


def main(arguments: list[str]) -> int:
    if len(arguments) < 2 or arguments[0] not in ("vllm", "sglang"):
        print(str(__doc__))
        return 2
    engine, wrong = arguments[0], 0
    for folder in arguments[1:]:
        lacks = missing(engine, Path(folder))
        wrong += bool(lacks)
        print(f"{folder}: {'; '.join(lacks) or 'has all names'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
