// The end of a part if the warps have different keys. The warps' states are merged through shared
// memory, in the order of the warps. The part's state is then merged with the states of the
// subtrees that it completes. A run's state goes to the merge of runs or, if the run covers all
// keys, to the output.
#pragma once

#include "mma_sync_decode/cluster_merge.cuh"
#include "mma_sync_decode/run_copies.cuh"

namespace flashsmith {

template <class Kernel, bool kPaged>
struct PartMerge : RunCopies<Kernel, kPaged> {
    using Base = RunCopies<Kernel, kPaged>;
    using value_t = typename Kernel::value_t;
    using Base::args, Base::kSkips, Base::rows, Base::smem, Base::states, Base::store_merged,
        Base::warp;
    using typename Base::Softmax, typename Base::Sums;
    // How many states, each of four columns of 16 rows, a thread merges at once. If these are all
    // of the thread's states of a part, it saves its states of first subtrees in registers.
    static constexpr int kStatesPerThread = Kernel::states_per_thread;
    static constexpr bool kSavesStates =
        kStatesPerThread > 1 && Kernel::row_tiles == 1 &&
        16 * (Kernel::d_v / 4) <= kStatesPerThread* Kernel::n_threads;
    // How many states are merged at the end of a part: one per warp, or a single one for all warps
    // if each has its own columns.
    static constexpr int kWarpStates = Kernel::own_columns ? 1 : Kernel::n_warps;
    // Whether warps with stages of their own may be at different stages, because they skip steps.
    static constexpr bool kStagesDiffer = kSkips && !Kernel::shares_stages;
    struct Saved {
        RowState states[kStatesPerThread];
    };

    using Base::Base;

    // ---- the steps ----

    // Merges the warps' states through shared memory, in the order of the warps, and then the
    // part's state with the states of the run's earlier parts.
    FS_DEVICE void merge_warps(int parts_left, int stage, const Softmax& softmax, const Sums& o,
                               Saved& saved) const {
        constexpr int kColumns = Kernel::d_v / 4;
        const int lane = lane_index();  // computed again, which saves a register during the steps
        if (kStagesDiffer && lane == 0)
            store_shared_1B(RunInfo::stage_address(smem + Kernel::target_offset, warp), stage);
        // Addresses in four neighbouring column tiles. Those in the next four tiles are 128 bytes
        // further on. Over codes a lane has four neighbouring columns of two tiles.
        constexpr int kTiles = Kernel::has_codes ? 2 : 1;
        uint32_t first_sums[4 / kTiles];
#pragma unroll
        for (int n = 0; n < 4 / kTiles; ++n)
            first_sums[n] = sums(warp, stage, lane / 4, 8 * kTiles * n + lane % 4 * 2 * kTiles);
        const uint32_t to_ninth_row = ninth_row(warp, stage);
#pragma unroll
        for (int m = 0; m < Kernel::row_tiles; ++m) {
            if (m > 0 && 16 * m >= rows) break;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = 8 * r + lane / 4;
                const float sum = quad_sum(softmax.row_sum[m][r]);
                if (16 * m + row >= rows) continue;
                if (lane % 4 == 0)
                    store_shared_8B(statistics(warp, 16 * m + row),
                                    {as_uint(softmax.offset[m][r]), as_uint(sum)});
#pragma unroll
                for (int n = 0; n < Kernel::column_tiles; n += kTiles) {
                    const uint32_t address =
                        first_sums[n % 4 / kTiles] + r * to_ninth_row + n / 4 * 128;
                    const auto bits = [&](int tile, int e) {
                        return as_uint(o[m][n + tile][2 * r + e]);
                    };
                    if constexpr (Kernel::has_codes)  // even columns are in the first tile
                        store_shared_16B(address, {bits(0, 0), bits(1, 0), bits(0, 1), bits(1, 1)});
                    else
                        store_shared_8B(address, {bits(0, 0), bits(0, 1)});
                }
            }
            __syncthreads();
            const RunInfo run(smem + Kernel::target_offset);
            if constexpr (Kernel::has_clusters)
                if (args.cluster_levels > 0 && m == 0 && parts_left == 1) cluster_wait();
            const int units = min(rows - 16 * m, 16) * kColumns;
            bool several = false;
            if constexpr (kStatesPerThread > 1) {
                several = takes_several(run);
                if (several)
                    for (int i = thread_index(); i < units;
                         i += kStatesPerThread * Kernel::n_threads)
                        finish_several(run, run.end_part - parts_left, stage, m, i, units, saved);
            }
            if (!several) {
                for (int i = thread_index(); i < units; i += Kernel::n_threads) {
                    const int row = i / kColumns, column = i % kColumns * 4;
                    finish_part(run, run.end_part - parts_left,
                                state_of_warps(stage, m, row, column), 16 * m + row, column);
                }
            }
            __syncthreads();  // the next copies, or other rows, will overwrite these states
        }
    }

    // Merges a part's state with the states of the subtrees that it completes, and saves the result
    // until the keys after it are done. A run that ends early, with its sequence, completes all
    // subtrees that it has.
    FS_DEVICE void finish_part(const RunInfo& run, int part, RowState state, int row,
                               int column) const {
        for (int level = 0; level < run.run_levels; ++level) {
            if ((part >> level & 1) != 0) {
                state.merge_after(saved_state(run, part, level, row, column));
            } else if (part + 1 < run.end_part) {
                save_state(state, run, part, level, row, column);
                return;
            }
        }
        finish_run(run, state, row, column);
    }

    // Stores the state of a run.
    FS_DEVICE void finish_run(const RunInfo& run, const RowState& state, int row,
                              int column) const {
        const int of_head = run.tile * Kernel::B_r + row;
        if (!run.has_all_parts()) {
            if constexpr (Kernel::has_clusters) {
                if (args.cluster_levels > 0) {
                    ClusterMerge<Kernel>(args, smem, rows)
                        .push(state, run.first_part >> run.run_levels,
                              row * (Kernel::d_v / 4) + column / 4);
                    return;
                }
            }
            if constexpr (Kernel::has_arrivals) {
                if (run.parts <= args.most_arriving) {
                    ArrivingStates<Kernel>(args, run.head_k, run.rows, run.parts)
                        .send(state, run.first_part, of_head, column);
                    return;
                }
            }
            states(run).store(state, run.first_part, of_head, column);
            return;
        }
        store_merged(run, state, of_head, column);
    }

    // ---- the warps' states ----

    // The address of a sum in a stage that holds 16 rows. Rows permute their groups of 8 columns,
    // so that four neighbouring rows lie in different banks.
    FS_DEVICE uint32_t sums(int of_warp, int stage, int row, int column) const {
        const uint32_t first =
            smem + Kernel::ring_offset + of_warp * Kernel::ring_bytes + stage * Kernel::stage_bytes;
        if constexpr (Kernel::rows_in_stage < 16) {
            return first + (row < 8 ? 0 : ninth_row(of_warp, stage)) +
                   (row % 8 * Kernel::d_v + ((column ^ (row & 3) << 3))) * 4;
        }
        return first + (row * Kernel::d_v + ((column ^ (row & 3) << 3))) * 4;
    }
    // The distance from the first row to the ninth, which may lie outside the stage.
    FS_DEVICE static uint32_t ninth_row(int of_warp, int stage) {
        constexpr uint32_t kBytes = 8 * Kernel::d_v * 4;
        if constexpr (Kernel::rows_in_stage == 16) return kBytes;
        return Kernel::other_sums_offset + of_warp * kBytes - Kernel::ring_offset -
               of_warp * Kernel::ring_bytes - stage * Kernel::stage_bytes;
    }
    FS_DEVICE uint32_t statistics(int of_warp, int row) const {
        return smem + Kernel::statistics_offset + (of_warp * Kernel::B_r + row) * 8;
    }

    // The stages that hold the warps' sums.
    struct Stages {
        const int own;
        uint2 of_warps{};  // a byte each

        FS_DEVICE Stages(uint32_t smem, int own) : own(own) {
            if constexpr (kStagesDiffer) of_warps = RunInfo::stages(smem + Kernel::target_offset);
        }
        FS_DEVICE int of(int warp) const {
            if constexpr (!kStagesDiffer) return own;
            return static_cast<int>((warp < 4 ? of_warps.x : of_warps.y) >> warp % 4 * 8 & 0xff);
        }
    };

    FS_DEVICE RowState state_of_warps(int stage, int m, int row, int column) const {
        RowState state, of_warps[kWarpStates];
        const Stages stages(smem, stage);
#pragma unroll
        for (int w = 0; w < kWarpStates; ++w) {
            of_warps[w] = RowState(load_shared_float2(statistics(w, 16 * m + row)),
                                   load_shared_16B(sums(w, stages.of(w), row, column)));
            state.maximum = fmaxf(state.maximum, of_warps[w].maximum);
        }
        // Branch-free: with branches, sums would wait for one after another.
#pragma unroll
        for (int w = 0; w < kWarpStates; ++w) state.add_if_any(of_warps[w]);
        return state;
    }

    FS_DEVICE void states_of_warps(RowState (&states)[kStatesPerThread], int stage, int m,
                                   const int (&row)[kStatesPerThread],
                                   const int (&column)[kStatesPerThread]) const {
        float2 of_warps[kStatesPerThread][Kernel::n_warps];
        const Stages stages(smem, stage);
#pragma unroll
        for (int w = 0; w < Kernel::n_warps; ++w)
#pragma unroll
            for (int i = 0; i < kStatesPerThread; ++i) {
                of_warps[i][w] = load_shared_float2(statistics(w, 16 * m + row[i]));
                states[i].maximum = fmaxf(states[i].maximum, of_warps[i][w].x);
            }
#pragma unroll
        for (int w = 0; w < Kernel::n_warps; ++w)
#pragma unroll
            for (int i = 0; i < kStatesPerThread; ++i)
                states[i].add_if_any(RowState(
                    of_warps[i][w], load_shared_16B(sums(w, stages.of(w), row[i], column[i]))));
    }

    // ---- several states at once ----

    // Whether each thread merges several states, which it does only in a run of several parts. In a
    // small call, fetching the code for several states for a single use would cost 0.3 to 0.7 us.
    FS_DEVICE bool takes_several(const RunInfo& run) const {
        return run.run_levels > 0 && min(rows, 16) * (Kernel::d_v / 4) > Kernel::n_threads;
    }

    // Finishes several states of a part, which are n_threads apart, from `first` on. Their loads
    // and sums do not wait for each other. Indices past the end are clamped, and their results are
    // not stored.
    FS_DEVICE void finish_several(const RunInfo& run, int part, int stage, int m, int first,
                                  int units, Saved& saved) const {
        constexpr int kColumns = Kernel::d_v / 4;
        int row[kStatesPerThread], column[kStatesPerThread];
#pragma unroll
        for (int i = 0; i < kStatesPerThread; ++i) {
            const int index = min(first + i * Kernel::n_threads, units - 1);
            row[i] = index / kColumns;
            column[i] = index % kColumns * 4;
        }
        RowState states[kStatesPerThread];
        states_of_warps(states, stage, m, row, column);
        const bool is_last = part + 1 == run.end_part;  // of the run
        int level = 0;
        if constexpr (kSavesStates) {
            if ((part & 1) != 0) {
#pragma unroll
                for (int i = 0; i < kStatesPerThread; ++i) states[i].merge_after(saved.states[i]);
            } else if (!is_last) {
#pragma unroll
                for (int i = 0; i < kStatesPerThread; ++i) saved.states[i] = states[i];
                return;
            }
            level = 1;
        }
        bool is_saved = false;
        for (; level < run.run_levels; ++level) {
            if ((part >> level & 1) != 0) {
                RowState before[kStatesPerThread];
#pragma unroll
                for (int i = 0; i < kStatesPerThread; ++i)
                    before[i] =
                        saved_state<kSavesStates>(run, part, level, 16 * m + row[i], column[i]);
#pragma unroll
                for (int i = 0; i < kStatesPerThread; ++i) states[i].merge_after(before[i]);
            } else if (!is_last) {
                is_saved = true;
                break;
            }
        }
        // One state at a time, because code length matters most here.
#pragma unroll 1
        for (int i = first; i < min(first + kStatesPerThread * Kernel::n_threads, units);
             i += Kernel::n_threads) {
            if (is_saved)
                save_state<kSavesStates>(states[0], run, part, level, 16 * m + i / kColumns,
                                         i % kColumns * 4);
            else
                finish_run(run, states[0], 16 * m + i / kColumns, i % kColumns * 4);
#pragma unroll
            for (int next = 1; next < kStatesPerThread; ++next) states[next - 1] = states[next];
        }
    }

    // ---- subtrees' states ----

    // The state of a subtree of 2^level parts. `part` is the subtree's last part when it is saved,
    // and the last part of the following subtree when it is loaded. From level kFirst on, states
    // are in shared memory as long as they fit. Other states are in global memory, in the slot of
    // the part after the subtree. That slot never belongs to a run, since threads may still read it
    // when the row's first thread stores the run's state. A thread reads back sums that it saved
    // itself. The statistics were stored by the row's first thread, for an earlier part.
    FS_DEVICE uint32_t saved_address(int level) const {
        return smem + Kernel::saved_states_offset + level * args.kept_level_bytes;
    }
    FS_DEVICE uint32_t saved_statistics() const { return args.slot_rows * Kernel::d_v * 4; }
    template <int kFirst = 0>
    FS_DEVICE RowState saved_state(const RunInfo& run, int part, int level, int row,
                                   int column) const {
        if (level >= args.kept_levels + kFirst)
            return states(run).load(part >> level << level, run.tile * Kernel::B_r + row, column);
        const uint32_t address = saved_address(level - kFirst);
        return RowState(load_shared_float2(address + saved_statistics() + row * 8),
                        load_shared_16B(address + (row * Kernel::d_v + column) * 4));
    }
    template <int kFirst = 0>
    FS_DEVICE void save_state(const RowState& state, const RunInfo& run, int part, int level,
                              int row, int column) const {
        if (level >= args.kept_levels + kFirst) {
            states(run).store(state, part + 1, run.tile * Kernel::B_r + row, column);
            return;
        }
        const uint32_t address = saved_address(level - kFirst);
        store_shared_16B(address + (row * Kernel::d_v + column) * 4, state.bits_of_sums());
        if (column == 0)
            store_shared_8B(address + saved_statistics() + row * 8, state.bits_of_statistics());
    }
};

}  // namespace flashsmith
