"""Decode problems as the machinery of mutants takes them, and mistakes in the kernels' sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from backward_cases import Asked, Spoiled
from operation_victims import SourcePatch

from flashsmith.emulator import Observer
from flashsmith.families import KernelConfig, Problem
from flashsmith.verify.decode_reference import DecodeReference

_REFERENCE = DecodeReference()


@dataclass(frozen=True)
class AskedDecode(Asked):
    """A decode problem without its dtype, and options of the reference."""

    #: Of the inputs: with some, no sequence has page 0, where bad entries lead.
    seed: int = 0
    #: For a planned device of so many SMs; None: as many as its victim's has.
    sm_count: int | None = None

    def problem(self, cfg: KernelConfig) -> Problem:
        return Problem.parse(f"{self.sizes} {cfg.dtype.name.lower()} decode")

    def case(self, cfg: KernelConfig) -> Spoiled:
        problem = self.problem(cfg)
        options = _REFERENCE.options(problem, **self.options)
        return _REFERENCE.case(cfg, problem, kind=self.inputs, seed=self.seed, options=options), {}

    def reasons(
        self,
        cfg: KernelConfig,
        observers: Sequence[Observer] = (),
        *,
        spoiled: Spoiled | None = None,
        **how: Any,
    ) -> tuple[str, ...]:
        case, _ = spoiled or self.case(cfg)
        if self.sm_count is not None:
            how["arch"] = replace(how["arch"], sm_count=self.sm_count)
        result = _REFERENCE.run(
            cfg,
            case,
            lambda array: array,
            emulate=True,
            observers=observers,
            schedule_seed=self.schedule_seed,
            **how,
        )
        reasons = _REFERENCE.compare(cfg, case, result.outputs).reasons
        # Stricter than the rule, which allows NaN next to what is not finite in v: a row without
        # keys gives 0.
        exact = case.expected.references.o
        unseeing = (exact == 0).all(axis=-1)
        if result.outputs["o"].reshape(exact.shape)[unseeing].any():
            reasons += ("o: not 0 in rows that see no key",)
        return reasons


_PART, _SPLIT = "mma_sync_decode/part_kernel.cuh", "mma_sync_decode/split.cuh"
_MERGE, _STATE = "mma_sync_decode/merge_kernel.cuh", "mma_sync_decode/row_state.cuh"
_APPEND = "mma_sync_decode/append_kernel.cuh"
_CHUNK = "mma_sync_decode/chunk_kernel.cuh"

#: By victim, since each of them has some of the code alone.
MISTAKES: dict[str, tuple[SourcePatch, ...]] = {
    "dense": (
        SourcePatch("the merge drops the last run", _MERGE, "min(begin + leaves, s.runs);",
                    "min(begin + leaves, s.runs - 1);"),
        SourcePatch("the merge loads one run less", _MERGE,
                    "if (first + i < end && column", "if (first + i < end - 1 && column"),
        SourcePatch("the merge takes its own parts for runs", _MERGE,
                    "kept.load((first + i) << s.run_levels,", "kept.load(first + i,"),
        SourcePatch("a pair of warps is left out", _MERGE, "all.join(right);", ";"),
        SourcePatch("the merge's head of a group", _MERGE, "head_k * args.heads_per_group + row",
                    "head_k + row"),
        SourcePatch("parts are a tile apart", _SPLIT, "int64_t{part} * rows + row)",
                    "int64_t{part} * Kernel::B_r + row)"),
        SourcePatch("runs of a part too few", _SPLIT, "(1 << s.run_levels), s.parts);",
                    "(1 << s.run_levels), s.parts - 1);"),
        SourcePatch("runs begin a part late", _SPLIT, "item.first_part = run << s.run_levels;",
                    "item.first_part = (run << s.run_levels) + (run > 0);"),
        SourcePatch("steps of a part go on into the next", _PART, "steps_until += steps_of_part;",
                    "steps_until += steps_of_part + 1;"),
        SourcePatch("a part's state is forgotten for the next", _PART, "before.join(state);", ";"),
        SourcePatch("the last part of a run waits too", _PART,
                    "} else if (part + 1 < target.end_part) {", "} else {"),
        SourcePatch("states of all levels at one place", _PART,
                    "smem + Kernel::kept_states_offset + level * args.kept_level_bytes;",
                    "smem + Kernel::kept_states_offset;"),
        SourcePatch("states in global memory at the wrong subtree", _PART,
                    "load(part >> level << level,", "load(part >> (level + 1) << (level + 1),"),
        SourcePatch("states in global memory where a run's is stored", _PART,
                    "store(state, part + 1, target.tile",
                    "store(state, part >> level << level, target.tile"),
        SourcePatch("a run's state at its last part", _PART,
                    "store(state, target.first_part, of_head,",
                    "store(state, target.end_part - 1, of_head,"),
        SourcePatch("a search from the sequence before", _SPLIT, "search.before += all;",
                    "search.before += max(all, 1u) - 1;"),
        SourcePatch("a part too few", _SPLIT, "s.parts = max((units + units_of_part - 1) /",
                    "s.parts = max(units /"),
        SourcePatch("a part too many", _SPLIT,
                    "s.parts = max((units + units_of_part - 1) / units_of_part, 1);",
                    "s.parts = max((units + units_of_part - 1) / units_of_part, 1) + 1;"),
        SourcePatch("parts for nothing are none", _SPLIT,
                    "s.parts = max((units + units_of_part - 1) / units_of_part, 1);",
                    "s.parts = (units + units_of_part - 1) / units_of_part;"),
        SourcePatch("lengths as they are, behind the capacity", _SPLIT,
                    "s.keys = min(max(args.cache_lens[batch], 0), args.capacity);",
                    "s.keys = args.cache_lens[batch] + 1;"),
        SourcePatch("a key too few", _SPLIT,
                    "s.keys = min(max(args.cache_lens[batch], 0), args.capacity);",
                    "s.keys = max(args.cache_lens[batch] - 1, 0);"),
        SourcePatch("items of the sequence before", _SPLIT,
                    "__ballot_sync(kWholeWarp, end <= within)",
                    "__ballot_sync(kWholeWarp, end < within)"),
        SourcePatch("tiles as parts", _SPLIT, "item.tile = rest % s.tiles;",
                    "item.tile = rest / s.tiles;"),
        SourcePatch("heads in the other order", _SPLIT,
                    "item.head_k = rest - run * args.heads_k;",
                    "item.head_k = args.heads_k - 1 - (rest - run * args.heads_k);"),
        SourcePatch("states of the first head", _SPLIT,
                    "(int64_t{batch} * args.heads_k + head_k)", "(int64_t{batch} * args.heads_k)"),
        SourcePatch("keys behind the run", _PART, "if (item.end_part < s.parts) end =",
                    "if (item.end_part < s.parts - 1) end ="),
        SourcePatch("the last key is not seen", _PART, "KeyRange keys{0, s.keys - 1};",
                    "KeyRange keys{0, s.keys - 2};"),
        SourcePatch("no mask", _PART,
                    "if (key < full_begin || key + kKeys > full_end) mask(scores, key);", ";"),
        SourcePatch("the diagonal is not seen", _PART,
                    "keys.last = min(keys.last, position);",
                    "keys.last = min(keys.last, position - 1);"),
        SourcePatch("top left", _PART, "query_of_row(row) + s.keys - s.queries;",
                    "query_of_row(row);"),
        SourcePatch("the query of the row alone", _PART,
                    "return args.by_group.divide(first_row + row);",
                    "return args.by_group.divide(row);"),
        SourcePatch("the first K/V head", _PART,
                    "(block * args.k_cache_strides.batch + item.head_k * "
                    "args.k_cache_strides.head)",
                    "(block * args.k_cache_strides.batch)"),
        SourcePatch("V of the first sequence", _PART,
                    "(block * args.v_cache_strides.batch + item.head_k * "
                    "args.v_cache_strides.head)",
                    "(item.head_k * args.v_cache_strides.head)"),
        SourcePatch("heads of a group of a power of two", _PART,
                    "first_row + row - query * args.heads_per_group;\n            const "
                    "char* source",
                    "((first_row + row) & (args.heads_per_group - 1));\n"
                    "            const char* source"),
        SourcePatch("rows behind the last are there", _PART, "row < rows && (!SEMANTICS.uneven",
                    "row < Kernel::B_r && (!SEMANTICS.uneven"),
        SourcePatch("columns behind d are there", _PART,
                    "present && (!SEMANTICS.uneven || first + 64 * p < args.d)", "present"),
        SourcePatch("a stage early", _PART, "cp_async_wait<kStages - 2>();",
                    "cp_async_wait<kStages - 1>();"),
        SourcePatch("stages follow each other a step late", _PART,
                    "start_step(step + kStages - 1, last, next_entry);",
                    "start_step(step + kStages, last, next_entry);"),
        SourcePatch("sums of one lane", _PART, "quad_sum(softmax.row_sum[m][r]);",
                    "softmax.row_sum[m][r];"),
        SourcePatch("a warp is left out", _PART,
                    "state.add(of_warp);", "if (w != 1) state.add(of_warp);"),
        SourcePatch("one part as several", _PART, "if (!target.has_all_parts()) {", "if (true) {"),
        SourcePatch("several parts as one", _PART, "if (!target.has_all_parts()) {",
                    "if (false) {"),
        SourcePatch("states over the tile before", _PART,
                    "store(state, target.first_part, of_head,",
                    "store(state, target.first_part, row,"),
        SourcePatch("statistics of the first part", _SPLIT,
                    "2 * (first + int64_t{row} * parts + part)",
                    "2 * (first + int64_t{row} * parts)"),
        SourcePatch("wrong base of weights of warps", _STATE,
                    "exp2_approx(other.maximum - maximum);",
                    "exp2_approx((other.maximum - maximum) * kLn2);"),
        SourcePatch("wrong base of weights of subtrees", _STATE,
                    "exp2_approx(next.maximum - joined);",
                    "exp2_approx((next.maximum - joined) * kLn2);"),
        SourcePatch("a subtree's maximum is the first one's", _STATE,
                    "fmaxf(maximum, next.maximum);", "maximum;"),
        SourcePatch("warps without keys count", _STATE, "if (other.is_empty()) return;", ";"),
        SourcePatch("subtrees without keys count", _STATE, "if (next.is_empty()) return;", ";"),
        SourcePatch("wrong base of LSE", _STATE, "base_ln = sink != nullptr && base == sink_log2 "
                    "? sink_ln : base * kLn2;", "base_ln = base;"),
        SourcePatch("wrong base of sinks", _STATE, "float sink_log2 = sink_ln * kLog2E;",
                    "float sink_log2 = sink_ln;"),
        SourcePatch("sinks twice", _STATE, "+ exp2_approx(sink_log2 - base);",
                    "+ 2.0f * exp2_approx(sink_log2 - base);"),
        SourcePatch("sinks in the LSE alone", _STATE,
                    "weight * reciprocal_approx(total);", "reciprocal_approx(row.sum);"),
        SourcePatch("sinks of the first head", _STATE, "nullptr : args.sinks + head);",
                    "nullptr : args.sinks);"),
        SourcePatch("rows without keys are not 0", _STATE, "row.is_empty() ? 0.0f : weight *",
                    "weight *"),
        SourcePatch("LSE of the first sequence", _STATE, "batch * args.lse_batch_stride", "0"),
    ),
    "parts": (
        SourcePatch("the merge drops a warp's states but the first eight", _MERGE,
                    "first < end; first += kAhead", "first == begin; first += kAhead"),
        SourcePatch("a warp's states join none that wait", _MERGE,
                    "join_waiting(states, waiting, count);", ";"),
    ),
    "paged": (
        SourcePatch("numbers of pages as they are", _PART,
                    "min(max(entry, 0), args.blocks - 1);", "entry - 1;"),
        SourcePatch("numbers behind the pool", _PART,
                    "if (key < begin || key >= end) return 0;", ";"),
        SourcePatch("pages of the first sequence", _PART,
                    "args.page_table[item.batch * args.page_table_stride +",
                    "args.page_table["),
        SourcePatch("pages of the next key", _PART, "args.by_page.divide(key)];",
                    "args.by_page.divide(key + 1)];"),
        SourcePatch("slots of the key before", _PART,
                    "slot = own - args.by_page.divide(own)",
                    "slot = own - 1 - args.by_page.divide(own - 1)"),
        SourcePatch("pages of a power of two", _PART,
                    "slot = own - args.by_page.divide(own) * "
                    "static_cast<int>(args.by_page.divisor)",
                    "slot = own & (static_cast<int>(args.by_page.divisor) - 1)"),
        SourcePatch("page and slot of the first row", _PART,
                    "__shfl_sync(kWholeWarp, slot, row);", "__shfl_sync(kWholeWarp, slot, 0);"),
        SourcePatch("the page of a stage before", _PART,
                    "next_entry = page_of(step + kStages);",
                    "next_entry = page_of(step + kStages - 1);"),
        SourcePatch("the last page's rest is there", _PART,
                    "const bool present = key >= begin && key < end;",
                    "const bool present = key >= begin;"),
        SourcePatch("keys in front of a window are there", _PART,
                    "const bool present = key >= begin && key < end;",
                    "const bool present = key < end;"),
        SourcePatch("windows begin a key late", _PART,
                    "keys.first = max(keys.first, position - args.window_left);",
                    "keys.first = max(keys.first, position - args.window_left + 1);"),
        SourcePatch("windows end a key early", _PART,
                    "keys.last = min(keys.last, position + args.window_right);",
                    "keys.last = min(keys.last, position + args.window_right - 1);"),
        SourcePatch("parts begin behind a window", _SPLIT,
                    "s.keys - s.queries - args.window_left, 0) & ~",
                    "s.keys - args.window_left + Kernel::B_c, 0) & ~"),
        SourcePatch("appended keys do not count", _SPLIT,
                    "s.keys = min(s.keys + s.queries, args.capacity);", ";"),
        SourcePatch("the cap left out", _PART,
                    "if constexpr (SEMANTICS.softcap) tanh_scaled(scores, "
                    "args.softcap_scale_2log2e);", ";"),
        SourcePatch("o of the first packed sequence", _STATE,
                    "int64_t{first_query + query} * args.o_strides.row +",
                    "int64_t{query} * args.o_strides.row +"),
        SourcePatch("LSE of the first packed sequence", _STATE,
                    "first_query +\n                 query]",
                    "query]"),
        SourcePatch("an append one late", _APPEND, "const int key = length + query;",
                    "const int key = length + query + 1;"),
        SourcePatch("an append one early", _APPEND, "const int key = length + query;",
                    "const int key = max(length + query - 1, 0);"),
        SourcePatch("all queries' keys at one place", _APPEND, "const int key = length + query;",
                    "const int key = length;"),
        SourcePatch("v where k is", _APPEND, "address(args.v_cache, args.v_cache_strides, block,",
                    "address(args.k_cache, args.k_cache_strides, block,"),
        SourcePatch("new rows of the first head", _APPEND,
                    "address(args.new_k, args.new_k_strides, batch, row, part)",
                    "address(args.new_k, args.new_k_strides, batch, row, 0)"),
        SourcePatch("the slot of another page", _APPEND,
                    "slot = key - page * static_cast<int>(args.by_page.divisor);", "slot = 0;"),
        SourcePatch("keys turned by one more", _APPEND,
                    "turn(source, target, position(length, query));",
                    "turn(source, target, position(length, query + 1));"),
        SourcePatch("queries turned by their length alone", _APPEND,
                    "position(length, moves ? query : 0)", "position(length, 0)"),
        SourcePatch("turned the other way", _APPEND,
                    "__fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin))",
                    "__fadd_rn(__fmul_rn(x, cos), __fmul_rn(y, sin))"),
        SourcePatch("halves as neighbours", _APPEND, "args.interleaved != 0 ? 2 * pair : pair;",
                    "args.interleaved == 0 ? 2 * pair : pair;"),
        SourcePatch("what is not turned is not copied", _APPEND,
                    "copy(source, target, 2 * args.rotary_half);", ";"),
        SourcePatch("fp32 angles as 16 bits", _APPEND, "if (args.rotary_fp32 != 0)", "if (false)"),
    ),
    "cluster": (
        SourcePatch("states for the first CTA alone", _PART,
                    "const int cta = turn & ((1 << levels) - 1);", "const int cta = 0;"),
        SourcePatch("states of all runs at one place", _PART,
                    "states + (run * turns * kTurn + index) * kBytes;", "states + index * kBytes;"),
        SourcePatch("a turn too few", _PART, "turns(((rows * kColumns / kTurn - 1) >> levels) + 1)",
                    "turns((rows * kColumns / kTurn) >> levels)"),
        SourcePatch("turns of the first CTA", _PART, "((own / kTurn << levels) + rank) * kTurn",
                    "(own / kTurn << levels) * kTurn"),
        SourcePatch("half of what comes is waited for", _PART,
                    "own_columns(rows) * runs * kBytes);", "own_columns(rows) * runs * 16);"),
        SourcePatch("nothing is waited for", _PART, "mbarrier_wait(cluster.barrier, 0);", ";"),
        SourcePatch("pushed before the others are there", _PART, "parts_left == 1) cluster_wait();",
                    "parts_left == 1) ;"),
        SourcePatch("a run less", _PART, "cluster.merged(target.runs(), i)",
                    "cluster.merged(target.runs() - 1, i)"),
        SourcePatch("runs of a part in a cluster", _SPLIT,
                    "s.run_levels = args.cluster_run_levels;", "s.run_levels = 0;"),
        SourcePatch("the place of a run's first part", _PART,
                    ".push(state, target.first_part >> target.run_levels,",
                    ".push(state, target.first_part,"),
        SourcePatch("the first head of all", _SPLIT, "item.head_k = rest;", "item.head_k = 0;"),
        SourcePatch("a cluster's items are its runs", _SPLIT,
                    "s.tiles * args.heads_k << args.cluster_levels;",
                    "s.runs * s.tiles * args.heads_k;"),
    ),
    "chunks": (
        SourcePatch("rows of the first warp", _PART,
                    "Kernel::takes_chunks ? 16 * warp : 0;", "0;"),
        SourcePatch("keys that all warps copy to the same place", _PART,
                    "Kernel::takes_chunks ? warp * kWarpKeys : 0;", "0;"),
        SourcePatch("keys of other warps before they are there", _PART,
                    "if constexpr (Kernel::takes_chunks)\n            __syncthreads();",
                    "if constexpr (Kernel::takes_chunks)\n            __syncwarp();"),
        SourcePatch("steps end where the warp's first row does", _CHUNK,
                    "seen_end = min(end, bottom.last + 1);", "seen_end = min(end, top.last + 1);"),
        SourcePatch("steps begin where the warp's last row does", _CHUNK,
                    "seen_begin = max(begin, top.first);",
                    "seen_begin = max(begin, bottom.first);"),
        SourcePatch("no mask where the last row sees all", _CHUNK,
                    "full_end = top.last + 1;", "full_end = bottom.last + 1;"),
        SourcePatch("no mask where the first row sees all", _CHUNK,
                    "full_begin = bottom.first;", "full_begin = top.first;"),
        SourcePatch("the other lane's columns in front", _CHUNK,
                    "state.o[e] = odd ? theirs[e] : first[e];",
                    "state.o[e] = odd ? first[e] : theirs[e];"),
        SourcePatch("columns of the first pair of lanes", _CHUNK,
                    "8 * (n + odd) + lane % 4 / 2 * 4;", "8 * (n + odd);"),
        SourcePatch("rows of the first half", _CHUNK, "warp_row() + 8 * r + lane / 4;",
                    "warp_row() + lane / 4;"),
        SourcePatch("sums of chunks of one lane", _CHUNK, "quad_sum(softmax.row_sum[0][r]);",
                    "softmax.row_sum[0][r];"),
        SourcePatch("sequences of the other kernel", _SPLIT,
                    "s.is_chunk == Kernel::takes_chunks", "s.is_chunk != Kernel::takes_chunks"),
        SourcePatch("tiles of chunks as small as others", _SPLIT,
                    "s.is_chunk ? Kernel::chunk_rows : Kernel::B_r;", "Kernel::B_r;"),
        SourcePatch("states of chunks over others'", _SPLIT,
                    "args.chunk_states + head_k * args.chunk_head_rows",
                    "head_k * args.chunk_head_rows"),
        SourcePatch("states of chunks of the first head", _SPLIT,
                    "head_k * args.chunk_head_rows +", "0 +"),
        SourcePatch("states of chunks of the first batch", _SPLIT,
                    "batch * args.chunk_batch_rows +", "0 +"),
        SourcePatch("states of chunks of the first query", _SPLIT,
                    "s.first_query * args.chunk_query_rows;", "0;"),
        SourcePatch("parts of chunks too short for their memory", _SPLIT,
                    "s.is_chunk ? args.min_chunk_units : args.min_units", "args.min_units"),
        SourcePatch("merged rows of the first head", _MERGE, "rest - row * args.heads_k", "0"),
        SourcePatch("the next row before the last is merged", _MERGE,
                    "__syncthreads();  // the next row's", ";  //"),
        SourcePatch("only the first rows are merged", _MERGE,
                    "s.queries * args.heads_per_group * args.heads_k : 0", "s.queries : 0"),
    ),
}  # fmt: skip
