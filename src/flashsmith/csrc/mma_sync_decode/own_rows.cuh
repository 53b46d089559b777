// The end of a part if each warp has 16 rows of the tile over all keys of its run. Nothing moves
// between warps. A thread has two rows' sums in every fourth pair of columns. It merges a part's
// sums with the sums of the subtrees that this part completes, and writes a run's sums.
#pragma once

#include "mma_sync_decode/cluster_merge.cuh"
#include "mma_sync_decode/run_copies.cuh"

namespace flashsmith {

template <class Kernel, bool kPaged>
struct OwnRowsMerge : RunCopies<Kernel, kPaged> {
    using Base = RunCopies<Kernel, kPaged>;
    using value_t = typename Kernel::value_t;
    using Base::args, Base::first_row, Base::item, Base::query_of_row, Base::rows, Base::smem,
        Base::states, Base::warp_row;
    using typename Base::Softmax, typename Base::Sums;
    // A thread saves its first column tiles in registers.
    struct Saved {
        float o[std::max(Kernel::saved_tiles, 1)][4];
    };

    using Base::Base;

    // Returns whether this was the run's last part. The tree is the same as in
    // PartMerge::finish_part(). A thread saves its own sums of the first subtree locally, and its
    // sums of other subtrees in global memory.
    FS_DEVICE bool finish_part(int parts_left, const Softmax& softmax, Sums& o,
                               Saved& saved) const {
        const int lane = lane_index();  // computed again, which saves a register during the steps
        if constexpr (Kernel::has_clusters)
            if (args.cluster_levels > 0 && parts_left == 1) cluster_wait();
        float2 statistics[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            statistics[r] = {softmax.offset[0][r], quad_sum(softmax.row_sum[0][r])};
        // Sums without keys are set to 0: V may hold NaN where P is 0.
        if (any_lane(statistics[0].y == 0.0f || statistics[1].y == 0.0f)) {
#pragma unroll
            for (int n = 0; n < Kernel::column_tiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (statistics[e / 2].y == 0.0f) o[0][n][e] = 0.0f;
        }
        const uint4 of_parts = RunInfo::of_parts(smem + Kernel::target_offset);
        const int part = static_cast<int>(of_parts.z) - parts_left;
        const int run_levels = static_cast<int>(of_parts.w);
        const bool is_last = parts_left == 1;   // of the run
        const int top = warp_row() + lane / 4;  // first of the thread's two rows in the tile
        if (run_levels > 0) {
            const uint32_t of_row = smem + Kernel::statistics_offset + top * 8;
            const uint32_t own =
                smem + Kernel::statistics_offset + Kernel::B_r * 8 + thread_index() * 16;
            const auto address = [&](int n) {
                return own + (n - Kernel::saved_tiles) * Kernel::n_threads * 16;
            };
            if ((part & 1) != 0) {
                const float2 before[2] = {load_shared_float2(of_row),
                                          load_shared_float2(of_row + 64)};
                merge_after(
                    before,
                    [&](int n, float (&x)[4]) {
                        uint4 bits{};
                        if (n >= Kernel::saved_tiles) bits = load_shared_16B(address(n));
                        const float of_bits[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y),
                                                  __uint_as_float(bits.z), __uint_as_float(bits.w)};
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            x[e] = n < Kernel::saved_tiles ? saved.o[n][e] : of_bits[e];
                    },
                    statistics, o);
            } else if (!is_last) {
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (lane % 4 == 0)
                        store_shared_8B(of_row + 64 * r,
                                        {as_uint(statistics[r].x), as_uint(statistics[r].y)});
#pragma unroll
                for (int n = 0; n < Kernel::column_tiles; ++n) {
                    if (n >= Kernel::saved_tiles)
                        store_shared_16B(address(n), {as_uint(o[0][n][0]), as_uint(o[0][n][1]),
                                                      as_uint(o[0][n][2]), as_uint(o[0][n][3])});
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (n < Kernel::saved_tiles) saved.o[n][e] = o[0][n][e];
                }
                return false;
            }
        }
#pragma unroll 1
        for (int level = 1; level < run_levels; ++level) {
            const bool is_odd = (part >> level & 1) != 0;
            if (!is_odd && is_last) continue;
            const RunInfo run(smem + Kernel::target_offset);
            const int of_head = run.tile * Kernel::B_r + top, column = lane % 4 * 2;
            const PartStates<Kernel> memory = states(run);
            const int where = is_odd ? part >> level << level : part + 1;
            float* sums[2];
            float* its_statistics[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                sums[r] = memory.sums(where, of_head + 8 * r) + column;
                its_statistics[r] = memory.statistics(where, of_head + 8 * r);
            }
            if (!is_odd) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    if (top + 8 * r >= rows) continue;
#pragma unroll
                    for (int n = 0; n < Kernel::column_tiles; ++n)
                        store_global_8B(sums[r] + 8 * n,
                                        {as_uint(o[0][n][2 * r]), as_uint(o[0][n][2 * r + 1])});
                    if (column == 0)
                        store_global_8B(its_statistics[r],
                                        {as_uint(statistics[r].x), as_uint(statistics[r].y)});
                }
                return false;
            }
            float2 before[2] = {};
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (top + 8 * r < rows)
                    before[r] = *reinterpret_cast<const float2*>(its_statistics[r]);
            merge_after(
                before,
                [&](int n, float (&x)[4]) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float2 both{0.0f, 0.0f};
                        if (top + 8 * r < rows)
                            both = *reinterpret_cast<const float2*>(sums[r] + 8 * n);
                        x[2 * r] = both.x, x[2 * r + 1] = both.y;
                    }
                },
                statistics, o);
        }
        store_run(statistics, o);
        return true;
    }

    // RowState::merge_after() for a thread's two rows. `columns` provides the four sums of a column
    // tile that precede the thread's own.
    template <class Before>
    FS_DEVICE void merge_after(const float2 (&before)[2], const Before& columns,
                               float2 (&statistics)[2], Sums& o) const {
        bool none_before[2], none[2];
        float weight_before[2], weight[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            none_before[r] = before[r].y == 0.0f, none[r] = statistics[r].y == 0.0f;
            const float maximum = fmaxf(before[r].x, statistics[r].x);
            weight_before[r] = exp2_approx(before[r].x - maximum);
            weight[r] = exp2_approx(statistics[r].x - maximum);
            const float both = fmaf(weight[r], statistics[r].y, weight_before[r] * before[r].y);
            statistics[r] = none[r]          ? before[r]
                            : none_before[r] ? statistics[r]
                                             : float2{maximum, both};
        }
#pragma unroll
        for (int n = 0; n < Kernel::column_tiles; ++n) {
            float x[4];
            columns(n, x);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int r = e / 2;
                const float both = fmaf(weight[r], o[0][n][e], weight_before[r] * x[e]);
                o[0][n][e] = none[r] ? x[e] : none_before[r] ? o[0][n][e] : both;
            }
        }
    }

    // Stores a run's rows, four columns at a time. Of two tiles of eight columns, even lanes get
    // four columns of the first tile and odd lanes get four columns of the second.
    FS_DEVICE void store_run(const float2 (&statistics)[2], Sums& o) const {
        const RunInfo run(smem + Kernel::target_offset);
        const int lane = lane_index();
        const bool odd = lane % 2 != 0;
#pragma unroll
        for (int n = 0; n < Kernel::column_tiles; n += 2)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    const float theirs =
                        __shfl_xor_sync(kWholeWarp, odd ? o[0][n][e] : o[0][n + 1][e], 1);
                    const float own = odd ? o[0][n + 1][e] : o[0][n][e];
                    o[0][n][e] = odd ? theirs : own;
                    o[0][n + 1][e] = odd ? own : theirs;
                }
        const int first_column = 8 * odd + lane % 4 / 2 * 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp_row() + 8 * r + lane / 4, of_head = run.tile * Kernel::B_r + row;
            if (row >= rows) continue;
            RowState state;
            state.maximum = statistics[r].x, state.sum = statistics[r].y;
            const auto of_columns = [&](int n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) state.o[e] = o[0][n + e / 2][2 * r + e % 2];
                return state;
            };
            if (run.has_all_parts()) {
                const int query = args.by_group.divide(of_head);
                const int head =
                    run.head_k * args.heads_per_group + of_head - query * args.heads_per_group;
                const auto end = row_end<Kernel>(args, state, head, run.head_k);
                char* const first = row_of_o(args, run.batch, run.first_query, query, head, 0);
#pragma unroll
                for (int n = 0; n < Kernel::column_tiles; n += 2) {
                    const int column = 8 * n + first_column;
                    if (column < d_of_v<Kernel>(args))
                        store_columns<value_t>(first + column * kElementBytes, of_columns(n), end);
                }
                if (lane % 4 == 0)
                    store_lse(args, end.lse, run.batch, run.first_query, query, head);
                continue;
            }
            if constexpr (Kernel::has_clusters) {
                if (args.cluster_levels > 0) {
                    using Cluster = ClusterMerge<Kernel>;
                    const Cluster cluster(args, smem, rows);
                    // Two pairs of tiles form one group, which has kGroup times four columns.
#pragma unroll
                    for (int n = 0; n < Kernel::column_tiles; n += 4) {
                        const typename Cluster::Group group =
                            cluster.group_of(run.first_part >> run.run_levels,
                                             row * (Cluster::kColumns / Cluster::kGroup) + n / 4);
#pragma unroll
                        for (int pair = 0; pair < 4; pair += 2)
                            cluster.push(of_columns(n + pair), group, 2 * pair + first_column / 4);
                    }
                    continue;
                }
            }
            const PartStates<Kernel> memory = states(run);
#pragma unroll
            for (int n = 0; n < Kernel::column_tiles; n += 2)
                memory.store(of_columns(n), run.first_part, of_head, 8 * n + first_column);
        }
    }

    // ---- tiles of many rows: each part is a run ----

    // Of two tiles of eight columns, even lanes get four columns of the first tile and odd lanes
    // get four columns of the second.
    FS_DEVICE void store_part(const Softmax& softmax, const Sums& o) const {
        static_assert(!Kernel::takes_chunks || Kernel::row_tiles == 1);
        const int lane = lane_index();  // computed again, which saves a register during the steps
        const bool odd = lane % 2 != 0;
        const DecodeSequence& s = item.sequence;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp_row() + 8 * r + lane / 4;
            const int query = query_of_row(row);
            const int head =
                item.head_k * args.heads_per_group + first_row + row - query * args.heads_per_group;
            RowState state;
            state.maximum = softmax.offset[0][r];
            state.sum = quad_sum(softmax.row_sum[0][r]);
            const bool present = row < rows;
            const auto end = row_end<Kernel>(args, state, present ? head : 0, item.head_k);
#pragma unroll
            for (int n = 0; n < Kernel::column_tiles; n += 2) {
                const float *const first = &o[0][n][2 * r], *const second = &o[0][n + 1][2 * r];
                float theirs[2];
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    theirs[e] = __shfl_xor_sync(kWholeWarp, odd ? first[e] : second[e], 1);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    state.o[e] = odd ? theirs[e] : first[e];
                    state.o[2 + e] = odd ? second[e] : theirs[e];
                }
                if (!present) continue;
                const int column = 8 * (n + odd) + lane % 4 / 2 * 4;
                if (s.parts == 1)
                    store_row<Kernel>(args, state, end, item.batch, s.first_query, query, head,
                                      column);
                else
                    PartStates<Kernel>(args, s, item.batch, item.head_k)
                        .store(state, item.first_part, first_row + row, column);
            }
        }
        // The barrier after the last step ensures that all warps have read what the next item's
        // copies overwrite.
    }
};

}  // namespace flashsmith
