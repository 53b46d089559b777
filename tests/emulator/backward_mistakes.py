"""Arithmetic mistakes in the sources of the backward pass, and wrong plans of its launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from backward_victims import BackwardVictim, ChangedPlan, SourcePatch

from flashsmith.runtime.launch_plan import Contents, LaunchPlan

_KEYS = "mma_sync_backward/keys_kernel.cuh"
_QUERIES = "mma_sync_backward/queries_kernel.cuh"
_FINISH = "mma_sync_backward/finish_kernel.cuh"
_CONSUMER, _BLOCK = "wgmma_backward/consumer.cuh", "wgmma_backward/key_block.cuh"
_PRODUCER, _ORDER = "wgmma_backward/producer.cuh", "wgmma_backward/dq_order.cuh"
_ROWS, _SEEN = "backward/rows_kernels.cuh", "backward/visibility.cuh"
_PLACES = "backward/rows.cuh"

#: By victim, since each of them has some of the code alone.
MISTAKES: dict[str, tuple[SourcePatch, ...]] = {
    "atomics": (
        SourcePatch("dropped D", _KEYS, "(dP[m][n][e] - (e % 2 == 0 ? D.x : D.y))", "dP[m][n][e]"),
        SourcePatch("D of the neighbour", _KEYS, "? D.x : D.y", "? D.y : D.x"),
        SourcePatch("lse of the neighbour", _KEYS, "? -lse_log2.x : -lse_log2.y",
                    "? -lse_log2.y : -lse_log2.x"),
        SourcePatch("D in lse's place", _KEYS, "row_statistic(at, 0, n)",
                    "row_statistic(at, 1, n)"),
        SourcePatch("dS of P twice", _KEYS, "dP[m][n][e] = P[m][n][e] *",
                    "dP[m][n][e] = P[m][n][e] * P[m][n][e] *"),
        SourcePatch("dropped mask of dS", _KEYS, "if (needs_mask) mask(dP, at);", ";"),
        SourcePatch("dropped mask of P", _KEYS, "if (needs_mask) mask(P, at);", ";"),
        SourcePatch("scale twice in dk", _KEYS, "store(args.dk, dk, args.scale,",
                    "store(args.dk, dk, args.scale * args.scale,"),
        SourcePatch("no scale in dk", _KEYS, "store(args.dk, dk, args.scale,",
                    "store(args.dk, dk, 1.0f,"),
        SourcePatch("scale in dv", _KEYS, "store(args.dv, dv, 1.0f,",
                    "store(args.dv, dv, args.scale,"),
        SourcePatch("dv of dS", _KEYS, "(dv, scores_rows(Kernel::P_offset), d_o)",
                    "(dv, scores_rows(Kernel::dS_offset), d_o)"),
        SourcePatch("dk of do", _KEYS, "(dk, scores_rows(Kernel::dS_offset), Q)",
                    "(dk, scores_rows(Kernel::dS_offset), d_o)"),
        SourcePatch("dP of K", _KEYS, "(dP, K_rows(Kernel::V_offset),",
                    "(dP, K_rows(Kernel::K_offset),"),
        SourcePatch("one head of a group", _KEYS, "first_head + args.heads_q / args.heads_k;",
                    "first_head + 1;"),
        SourcePatch("wrong group of heads", _KEYS,
                    "const int first_head = head_k * (args.heads_q / args.heads_k);",
                    "const int first_head = head_k;"),
        SourcePatch("K of the first head", _KEYS,
                    "batch * args.k_batch_stride + head_k * args.k_head_stride,\n"
                    "                                 k.first + first_key, args.k_seq_stride),\n"
                    "            args.k_seq_stride",
                    "batch * args.k_batch_stride,\n"
                    "                                 k.first + first_key, args.k_seq_stride),\n"
                    "            args.k_seq_stride"),
        SourcePatch("no zeros in rows that see nothing", _KEYS, "if (rows <= 0) return;",
                    "return;"),
        SourcePatch("rows behind the last are there", _KEYS,
                    "const TileExtent present = extent(q.count - first_row);",
                    "const TileExtent present = extent(Kernel::B_r);"),
        SourcePatch("keys behind the last are there", _KEYS,
                    "const TileExtent present = extent(k.count - first_key);",
                    "const TileExtent present = extent(Kernel::B_c);"),
        SourcePatch("the stage of before", _KEYS, "now.stage ^ 1;", "now.stage;"),
        SourcePatch("no scale in finish", _FINISH,
                    "(\n                tile, dq, args.scale, row, turn, lane);",
                    "(\n                tile, dq, 1.0f, row, turn, lane);"),
        SourcePatch("scale twice in finish", _FINISH,
                    "(\n                tile, dq, args.scale, row, turn, lane);",
                    "(\n                tile, dq, args.scale * args.scale, row, turn, lane);"),
        SourcePatch("sums of rows that see nothing", _FINISH, "< unseeing ? 0.0f : sum",
                    "< 0 ? 0.0f : sum"),
        SourcePatch("sums of the first head", _FINISH,
                    "first_statistic<SEMANTICS>(args, batch, head, q.first) + first_row;",
                    "first_statistic<SEMANTICS>(args, batch, 0, q.first) + first_row;"),
        SourcePatch("dropped dlse", _ROWS, "sum -= args.dlse[", "sum -= 0.0f * args.dlse["),
        SourcePatch("dlse added", _ROWS, "sum -= args.dlse[", "sum += args.dlse["),
        SourcePatch("dlse of the first head", _ROWS, "head * args.dlse_head_stride", "0"),
        SourcePatch("lse of the first head", _ROWS, "head * args.lse_head_stride", "0"),
        SourcePatch("lse of the first batch", _ROWS, "batch * args.lse_batch_stride", "0"),
        SourcePatch("do of the first batch", _ROWS, "batch * args.do_batch_stride", "0"),
        SourcePatch("wrong base of lse", _ROWS, "lse_log2 = lse * kLog2E;", "lse_log2 = lse;"),
        SourcePatch("lse of -inf as it is", _ROWS, "if (lse != -INFINITY)", "if (true)"),
        SourcePatch("do where o is 0", _ROWS, "y.x == 0.0f ? sum : fmaf", "false ? sum : fmaf"),
        SourcePatch("a quarter of the lanes", _ROWS, "int lanes = kLanes / 2; lanes > 0",
                    "int lanes = kLanes / 2; lanes > 1"),
        SourcePatch("statistics of rows behind the last", _ROWS,
                    "if (row < q.count && chunk", "if (chunk"),
        SourcePatch("dsinks with the other sign", _ROWS, "sum = fmaf(-exp2_approx(sink",
                    "sum = fmaf(exp2_approx(sink"),
        SourcePatch("wrong base of sinks", _ROWS, "args.sinks[head] * kLog2E", "args.sinks[head]"),
        SourcePatch("half of the sinks' sums", _ROWS, "half = kRowsKernelThreads / 2;",
                    "half = kRowsKernelThreads / 4;"),
        SourcePatch("dsinks of the first batch", _ROWS,
                    "batch < args.batch; ++batch) {\n        const SequenceRows q",
                    "batch < 1; ++batch) {\n        const SequenceRows q"),
        SourcePatch("the diagonal is not seen", _SEEN, "keys.last = min(keys.last, position);",
                    "keys.last = min(keys.last, position - 1);"),
        SourcePatch("a key too many is seen", _SEEN, "keys.last = min(keys.last, position);",
                    "keys.last = min(keys.last, position + 1);"),
        SourcePatch("top left", _SEEN,
                    "const int position = row + seq_k - seq_q;\n        KeyRange",
                    "const int position = row;\n        KeyRange"),
        SourcePatch("a block of queries too few", _SEEN,
                    ".end = static_cast<int>((end + B_r - 1) / B_r),\n            .full_begin",
                    ".end = static_cast<int>(end / B_r),\n            .full_begin"),
        SourcePatch("begins a block late", _SEEN, ".begin = static_cast<int>(begin / B_r),",
                    ".begin = static_cast<int>((begin + B_r - 1) / B_r),"),
        SourcePatch("full a block early", _SEEN,
                    ".full_begin = static_cast<int>((full_begin + B_r - 1) / B_r),",
                    ".full_begin = static_cast<int>(full_begin / B_r),"),
        SourcePatch("a row too many sees nothing", _SEEN,
                    "max(0, seq_q - seq_k - reach));", "max(0, seq_q - seq_k - reach + 1));"),
        SourcePatch("a row too few sees nothing", _SEEN,
                    "max(0, seq_q - seq_k - reach));", "max(0, seq_q - seq_k - reach - 1));"),
    ),
    "unmasked": (
        SourcePatch("keys that are not there are seen", _SEEN,
                    "if (first_key + keys > seq_k) full_end = 0;", ";"),
    ),
    "two kernels": (
        SourcePatch("dropped D in dq", _QUERIES, "(dP[0][n][e] - D[e / 2])", "dP[0][n][e]"),
        SourcePatch("D of the other row in dq", _QUERIES, "(dP[0][n][e] - D[e / 2])",
                    "(dP[0][n][e] - D[1 - e / 2])"),
        SourcePatch("lse of the other row in dq", _QUERIES, "-lse_log2[e / 2]",
                    "-lse_log2[1 - e / 2]"),
        SourcePatch("the cap's gradient dropped in dq", _QUERIES,
                    "P * fmaf(-tangent, tangent, 1.0f)", "P"),
        SourcePatch("the cap's gradient dropped", _KEYS,
                    "? P[m][n][e] * fmaf(-S[m][n][e], S[m][n][e], 1.0f)", "? P[m][n][e]"),
        SourcePatch("the cap's gradient in P too", _KEYS,
                    "        round_to<value_t>(rounded, P);\n#pragma unroll\n",
                    "        for (int m = 0; m < Kernel::key_tiles; ++m)\n"
                    "            for (int n = 0; n < Kernel::query_tiles; ++n)\n"
                    "                for (int e = 0; e < 4; ++e)\n"
                    "                    P[m][n][e] *= fmaf(-S[m][n][e], S[m][n][e], 1.0f);\n"
                    "        round_to<value_t>(rounded, P);\n#pragma unroll\n"),
        SourcePatch("the cap left out", _KEYS,
                    "if constexpr (SEMANTICS.softcap) tanh_scaled(S, args.softcap_scale_2log2e);",
                    ";"),
        SourcePatch("dropped mask of dS in dq", _QUERIES, "if (needs_mask) mask(dP, block);", ";"),
        SourcePatch("sums of rows that see nothing in dq", _QUERIES,
                    "if (lane_row() + e / 2 * 8 < visibility.first_seeing_row())", "if (false)"),
        SourcePatch("scale twice in dq", _QUERIES, "(tile, dq, args.scale, 16 * warp",
                    "(tile, dq, args.scale * args.scale, 16 * warp"),
        SourcePatch("no scale in dq", _QUERIES, "(tile, dq, args.scale, 16 * warp",
                    "(tile, dq, 1.0f, 16 * warp"),
        SourcePatch("wrong group of heads in dq", _QUERIES,
                    "const int head_k = head / (args.heads_q / args.heads_k);",
                    "const int head_k = head % args.heads_k;"),
        SourcePatch("dq of V", _QUERIES, "ColumnsB<Layout, 1>(K_tile(stage), lane)",
                    "ColumnsB<Layout, 1>(V_tile(stage), lane)"),
        SourcePatch("the window's left limit", _SEEN, "position - left);", "position - left + 1);"),
        SourcePatch("the window's right limit", _SEEN, "position + right);",
                    "position + right + 1);"),
        SourcePatch("the window's last queries", _SEEN, "last_key + left + shift + 1);",
                    "last_key + left + shift - 30);"),
        SourcePatch("the window's first queries", _SEEN, "first_key - reach + shift);",
                    "first_key - reach + shift + 30);"),
        SourcePatch("all queries see all keys", _SEEN, "first_key + left + shift + 1);",
                    "first_key + left + shift + 40);"),
        SourcePatch("a block of keys too few", _SEEN, ".end = bottom.last / B_c + 1,",
                    ".end = bottom.last / B_c,"),
        SourcePatch("a block of keys is full too early", _SEEN,
                    ".full_begin = (bottom.first + B_c - 1) / B_c,",
                    ".full_begin = bottom.first / B_c,"),
        SourcePatch("a block of keys is full too late", _SEEN,
                    ".full_end = max(top.last + 1, 0) / B_c,",
                    ".full_end = max(top.last + B_c, 0) / B_c,"),
        SourcePatch("statistics of the sequence before", _PLACES,
                    "(first_row / kStatisticsRows + batch)", "(first_row / kStatisticsRows)"),
        SourcePatch("a sequence's last row is in a gap", _ROWS, "row < rows.first + rows.count;",
                    "row < rows.first + rows.count - 1;"),
        SourcePatch("rows of a gap are in a sequence", _ROWS, "row < rows.first + rows.count;",
                    "row < rows.first + rows.count + 1;"),
        SourcePatch("no gaps in dv", _ROWS,
                    "clear(args.dv, args.heads_k, args.dv_seq_stride, args.dv_head_stride);", ";"),
        SourcePatch("gaps in the first head of k alone", _ROWS, "clear(args.dk, args.heads_k,",
                    "clear(args.dk, 1,"),
        SourcePatch("every row is in some sequence", _ROWS, "if (any_lane(found)) return;",
                    "return;"),
    ),
    "wgmma": (
        SourcePatch("dropped D", _CONSUMER, "(dP[0][n][e] - (e % 2 == 0 ? D[n].x : D[n].y))",
                    "dP[0][n][e]"),
        SourcePatch("D of the neighbour", _CONSUMER, "? D[n].x : D[n].y", "? D[n].y : D[n].x"),
        SourcePatch("lse of the neighbour", _CONSUMER, "? -lse[n].x : -lse[n].y",
                    "? -lse[n].y : -lse[n].x"),
        SourcePatch("D of Q's stage", _CONSUMER,
                    "RowPairs D;\n        load_rows(D, Kernel::D_offset, d_o.state.stage())",
                    "RowPairs D;\n        load_rows(D, Kernel::D_offset, d_o.state.stage() ^ 1)"),
        SourcePatch("dropped mask of dS", _CONSUMER,
                    "if (blocks.needs_mask(block)) mask(dP);", ";"),
        SourcePatch("dropped mask of P", _CONSUMER, "if (blocks.needs_mask(block)) mask(p);", ";"),
        SourcePatch("no zeros in rows that see nothing", _CONSUMER,
                    "if (rows <= 0) return;\n        mbarrier_wait",
                    "return;\n        mbarrier_wait"),
        SourcePatch("scale twice in dk", _CONSUMER, "store(args.dk, dk, args.scale,",
                    "store(args.dk, dk, args.scale * args.scale,"),
        SourcePatch("scale in dv", _CONSUMER, "store(args.dv, dv, 1.0f,",
                    "store(args.dv, dv, args.scale,"),
        SourcePatch("scores add to those before", _CONSUMER,
                    "b + Panel::template column_step<Kernel::B_r>(step), step > 0);",
                    "b + Panel::template column_step<Kernel::B_r>(step), 1);"),
        SourcePatch("dq adds to the one before", _CONSUMER,
                    "b + Panel::row_step(step), step > 0);", "b + Panel::row_step(step), 1);"),
        SourcePatch("dk and dv of the last step", _CONSUMER, "b + Panel::row_step(step), 1);",
                    "b + Panel::row_step(step), step > 0);"),
        SourcePatch("sums of dq stay in one block", _CONSUMER, "dq_sums += kBlock;", ";"),
        SourcePatch("sums of dq stay in one head", _CONSUMER,
                    "dq_sums += Kernel::first_dq_sum(args.statistics_head_stride) -",
                    "dq_sums += 0 -"),
        SourcePatch("the first warpgroup's columns of dq", _CONSUMER,
                    "Kernel::shares_rows ? 0 : part * Kernel::dq_columns;", "0;"),
        SourcePatch("dS is not fenced", _CONSUMER,
                    "tma_store_fence();\n        __syncwarp();", "__syncwarp();"),
        SourcePatch("dS without a wait for the warp", _CONSUMER,
                    "tma_store_fence();\n        __syncwarp();", "tma_store_fence();"),
        SourcePatch("one head of a group", _BLOCK, "n_heads = args.heads_q / args.heads_k;",
                    "n_heads = 1;"),
        SourcePatch("wrong group of heads", _BLOCK, "first_head = head_k * n_heads;",
                    "first_head = head_k;"),
        SourcePatch("statistics of the first head", _BLOCK,
                    "(args, batch, step.head, q.first)", "(args, batch, 0, q.first)"),
        SourcePatch("lse in D's place", _PRODUCER, "Kernel::D_offset, args.problem.D);",
                    "Kernel::D_offset, args.problem.lse_log2);"),
        SourcePatch("V of K's rows", _PRODUCER,
                    "load_keys(V, &args.v,", "load_keys(V, &args.k,"),
        SourcePatch("no scale in finish", "wgmma_backward/finish_kernel.cuh",
                    "args.grads_fp32, dq, args.scale);", "args.grads_fp32, dq, 1.0f);"),
        SourcePatch("sums of rows that see nothing", "wgmma_backward/finish_kernel.cuh",
                    "< unseeing ? 0.0f", "< 0 ? 0.0f"),
    ),
    "ordered": (
        SourcePatch("no wait", _ORDER, "while (load_acquire(counter) != turn)", "while (false)"),
        SourcePatch("no turn looked at", _ORDER, "load_relaxed(counter) == turn;", "true;"),
        SourcePatch("no acquire", _ORDER, "ld.acquire.gpu", "ld.relaxed.gpu"),
        SourcePatch("acquire in the CTA", _ORDER, "ld.acquire.gpu", "ld.acquire.cta"),
        SourcePatch("no fence", _ORDER, "            fence_acq_rel();\n", ""),
        SourcePatch("fence in the CTA", _ORDER, "fence.acq_rel.gpu", "fence.acq_rel.cta"),
        SourcePatch("fence behind the turn", _ORDER,
                    "fence_acq_rel();\n            store_relaxed(done, turn + 1);",
                    "store_relaxed(done, turn + 1);\n            fence_acq_rel();"),
        SourcePatch("the turn stays", _ORDER, "store_relaxed(done, turn + 1)",
                    "store_relaxed(done, turn)"),
        SourcePatch("a turn too far", _ORDER, "store_relaxed(done, turn + 1)",
                    "store_relaxed(done, turn + 2)"),
        SourcePatch("passed on before the sums", _ORDER,
                    "mbarrier_wait(order.added(), odd);", ";"),
        SourcePatch("granted before the turn", _ORDER,
                    "mbarrier_wait(granted(), odd)", "mbarrier_wait(granted(), odd ^ 1)"),
        SourcePatch("not granted", _ORDER, "mbarrier_arrive(order.granted());", ";"),
        SourcePatch("sums of one lane", _ORDER,
                    "__syncwarp();\n            if (lane == 0) mbarrier_arrive(added());",
                    "if (lane == 0) mbarrier_arrive(added());"),
        SourcePatch("sums not told of", _ORDER, "if (lane == 0) mbarrier_arrive(added());", ";"),
        SourcePatch("another's turn", _ORDER, "turn = keys.first_key / Kernel::B_c;",
                    "turn = keys.first_key / Kernel::B_c + 1;"),
        SourcePatch("one block unordered", _ORDER,
                    ".end;\n        // As KeyBlock", ".end - 1;\n        // As KeyBlock"),
        SourcePatch("all parts have one counter", _ORDER, " +\n               part;", ";"),
        SourcePatch("both parts wait for one", _ORDER,
                    "first(smem + Kernel::order_barriers + 16 * part)",
                    "first(smem + Kernel::order_barriers + 16 * (part & 0))"),
        SourcePatch("the counter is a sum", _ORDER,
                    "Kernel::first_dq_sum(statistic) +\n"
                    "                                           Kernel::B_r * Kernel::d_head) +",
                    "Kernel::first_dq_sum(statistic)) +"),
        SourcePatch("waits for later CTAs", _BLOCK,
                    "first_key = place / heads * Kernel::B_c;",
                    "first_key = (n_blocks - 1 - place / heads) * Kernel::B_c;"),
        SourcePatch("counters not cleared", _ROWS,
                    "kStatisticsRows / Kernel::B_r * Kernel::dq_block_floats;",
                    "Kernel::B_r * Kernel::d_head;"),
    ),
}  # fmt: skip


def wrong_plans(victim: BackwardVictim, plan: LaunchPlan) -> Iterator[tuple[str, ChangedPlan]]:
    """Changes of a plan, by name: without a launch, with one before what it needs, of too few CTAs,
    with workspaces that are too short or hold anything. ``plan`` is one of the victim's."""
    roles = {entry: role for role, entry in victim.roles.items()}
    for index, launch in enumerate(plan.launches):
        role = roles[launch.kernel]
        yield f"without {role}", _without(index)
        yield f"half of {role}", _fewer_ctas(index)
        if role not in ("prepare", "gaps"):
            yield f"{role} first", _first(index)
    for index, workspace in enumerate(plan.workspaces):
        yield f"half of {workspace.name}", _shorter(index)
        if workspace.contents == Contents.ZEROED:
            yield f"{workspace.name} not zeroed", _not_zeroed(index)


def _without(index: int) -> ChangedPlan:
    return lambda plan: replace(
        plan, launches=tuple(one for i, one in enumerate(plan.launches) if i != index)
    )


def _fewer_ctas(index: int) -> ChangedPlan:
    def change(plan: LaunchPlan) -> LaunchPlan:
        launches = list(plan.launches)
        x, y, z = launches[index].grid
        launches[index] = replace(launches[index], grid=(x // 2, y, z))
        return replace(plan, launches=tuple(launches))

    return change


def _first(index: int) -> ChangedPlan:
    def change(plan: LaunchPlan) -> LaunchPlan:
        launches = list(plan.launches)
        launches.insert(0, launches.pop(index))
        return replace(plan, launches=tuple(launches))

    return change


def _shorter(index: int) -> ChangedPlan:
    def change(plan: LaunchPlan) -> LaunchPlan:
        workspaces = list(plan.workspaces)
        workspaces[index] = workspaces[index]._replace(nbytes=workspaces[index].nbytes // 2)
        return replace(plan, workspaces=tuple(workspaces))

    return change


def _not_zeroed(index: int) -> ChangedPlan:
    def change(plan: LaunchPlan) -> LaunchPlan:
        workspaces = list(plan.workspaces)
        workspaces[index] = workspaces[index]._replace(contents=Contents.UNDEFINED)
        return replace(plan, workspaces=tuple(workspaces))

    return change
