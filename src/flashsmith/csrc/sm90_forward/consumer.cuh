// A consumer warpgroup: attention for 64 rows of Q of one tile after another.
#pragma once

#include "common/changed_scores.cuh"
#include "common/opaque.cuh"
#include "common/program_scores.cuh"
#include "sm90_forward/max_policy.cuh"
#include "sm90_forward/output.cuh"
#include "sm90_forward/partner_messages.cuh"
#include "sm90_forward/running_state.cuh"
#include "sm90_forward/stage_order.cuh"

namespace flashsmith {

template <class Kernel>
struct Consumer {
    static_assert(Kernel::valid_config());
    static constexpr WgmmaForwardKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    using MaxPolicy =
        std::conditional_t<Kernel::canonical, CanonicalMax<Kernel>,
                           std::conditional_t<CFG.stale_max, StaleMax<Kernel>, CurrentMax<Kernel>>>;

    // ---- state ----

    const typename Kernel::Args& args;
    const ForwardKernelArgs& problem;
    const uint32_t smem;
    const int warpgroup, warp, lane;
    const StageOrder<Kernel> order;

    PipelineState<CFG.q_buffers> Q_state;
    TilePipeline<CFG.kv_stages, Kernel::K_tile_bytes, CFG.cluster_size> K;
    TilePipeline<CFG.kv_stages, Kernel::V_tile_bytes, CFG.cluster_size> V;
    OutputStore<Kernel> output;
    TileInfoOf<Kernel> tile;

    typename MaxPolicy::Softmax softmax;
    typename Kernel::S_t S;
    typename Kernel::P_t P;
    typename Kernel::register_Q_t register_Q;  // of the current tile
    typename Kernel::O_t O;
    bool O_is_begun;
    bool rescales_O;     // whether to multiply O by O_factors after the block's softmax
    float O_factors[2];  // by row
    MaxPolicy max_policy;
    typename MaxPolicy::Softmax::BlockSums block_sums;
    float row_weights[1][2];  // final factors of O's rows
    std::conditional_t<Kernel::halves_O, PartnerMessages<Kernel>, NoMessages> messages;
    BlockEntry entry;  // with lists: the entry of the block whose scores are computed

    FS_DEVICE Consumer(const typename Kernel::Args& args, uint32_t smem, int warpgroup)
        : args(args),
          problem(args.problem),
          smem(smem),
          warpgroup(warpgroup),
          warp(__shfl_sync(0xffffffffu, thread_index() / kWarpSize % kWarpsPerWarpgroup, 0)),
          lane(lane_index()),
          order{{warpgroup}},
          K(smem + Kernel::K_offset, smem + Kernel::K_barriers),
          V(smem + Kernel::V_offset, smem + Kernel::V_barriers),
          output{args, warp, lane},
          softmax(problem.scale_log2),
          messages(smem) {}

    // ---- the algorithm ----

    FS_DEVICE void run() {
        order.init();
        while (receive_tile()) {
            const BlockRange mine = blocks_of_warpgroup();
            if constexpr (Kernel::canonical) {
                run_canonically(mine);
                continue;
            }
            const int later = tile.block_end - mine.end;  // blocks that only other warpgroups see
            const bool order_is_pending = Kernel::last_rows_first && later > 0;
            // Every warpgroup takes part in the order once per block, except for the tile's first
            // block.
            skip_blocks(later, later - order_is_pending);
            if (mine.begin < mine.end)
                main_loop(mine, order_is_pending);
            else
                finish_empty_rows();
            skip_blocks(mine.begin - tile.block_begin, tile.n_blocks() - 1);
            finish_tile();
        }
        output.finish();
    }

    // The last block comes first, because masks and ragged ends mostly concern a row's last blocks.
    // If this warpgroup still owes a turn in the order, it takes the turn after the first scores:
    // the next warpgroup does not need it sooner.
    FS_DEVICE void main_loop(const BlockRange& blocks, bool order_is_pending) {
        int block = blocks.end - 1;
        O_is_begun = false;
        load_register_Q();
        K.consumer_wait();
        read_entry();
        const int steps = steps_of_last_block(block);
        run_QK_gemm_of(steps);
        finish_QK_gemm<0, true>();
        output.drain();
        compute_probabilities<true>(block, blocks);
        pack_P();
        send_P();
        if (order_is_pending) order.wait_and_arrive();
        if constexpr (Kernel::has_short_blocks)
            if (is_short(steps) && block > blocks.begin)
                continue_after_short_block(--block, blocks, steps);

#pragma unroll 1
        while (--block >= blocks.begin) next_block(block, blocks);
        V.consumer_wait();
        start_PV_gemm();
        finalize_rows();
        finish_PV_gemm();
    }

    // Computes a block's scores and probabilities, and O up to the preceding block.
    FS_DEVICE void next_block(int block, const BlockRange& blocks) {
        K.consumer_wait();
        V.consumer_wait();
        order.template wait<PingPong::gemm>();
        if constexpr (CFG.overlap) {
            start_QK_gemm();
            start_PV_gemm();
            order.template arrive<PingPong::gemm>();
            read_entry();
            finish_QK_gemm<1, false>();
            compute_probabilities<false>(block, blocks);
            if constexpr (CFG.early_exp) end_basic_block_after(S);
            finish_PV_gemm();
        } else {
            start_PV_gemm();
            finish_PV_gemm();
            start_QK_gemm();
            order.template arrive<PingPong::gemm>();
            read_entry();
            finish_QK_gemm<0, false>();
            compute_probabilities<false>(block, blocks);
        }
        max_policy.finish_P(*this);
        send_P();
        if (rescales_O) softmax.rescale(O, O_factors);
    }

    // The main loop of canonical kernels: from the first block on, chunk by chunk (docs/bits.md).
    // Every warpgroup takes part in the order once per block, except for the tile's first block.
    FS_DEVICE void run_canonically(const BlockRange& mine) {
        const int before = mine.begin - tile.block_begin;  // blocks that only other warpgroups see
        skip_blocks(before, max(before - 1, 0));
        if (mine.begin < mine.end)
            canonical_loop(mine);
        else
            finish_empty_rows();
        skip_blocks(tile.block_end - max(mine.end, tile.block_begin), 1 << 30);
        finish_tile();
    }
    FS_DEVICE void canonical_loop(const BlockRange& blocks) {
        int block = blocks.begin;
        zero(O);  // no GEMM reads O yet, but its registers must have values
        load_register_Q();
        if (block > tile.block_begin) order.wait_and_arrive();
#pragma unroll 1
        while (true) {
            const int end = end_of_chunk(block, blocks);
            const bool is_first = block == blocks.begin, is_last = end == blocks.end;
            compute_chunk(block, end, blocks, is_last);
            softmax.finish_chunk();
            if (!is_first)
                running_state().merge_into(softmax, O,
                                           [&](const StateMerge(&merge)[2]) { send_merge(merge); });
            if (is_last) break;
            running_state().store(softmax, O);
            block = end;
        }
        finalize_rows();
    }
    // The end of the range of blocks that begins at `block` and lies in one chunk.
    FS_DEVICE int end_of_chunk(int block, const BlockRange& blocks) const {
        if constexpr (Kernel::has_lists) {
            // Blocks are positions in the tile's list, which is in memory and in ascending order.
            const int32_t* const entries = tile.list + kBlockListHeader;
            const auto chunk_at = [&](int position) {
                return BlockEntry{entries[position]}.block() / Kernel::chunk_blocks;
            };
            const int chunk = chunk_at(block);
            int end = block + 1, beyond = blocks.end;
            while (end < beyond) {
                const int middle = (end + beyond) / 2;
                if (chunk_at(middle) == chunk)
                    end = middle + 1;
                else
                    beyond = middle;
            }
            return end;
        }
        return min(blocks.end, (block / Kernel::chunk_blocks + 1) * Kernel::chunk_blocks);
    }
    // The last PV GEMM takes the turn of the next chunk's first block. The other warpgroups' GEMMs
    // then continue while this chunk is merged with earlier chunks.
    FS_DEVICE void compute_chunk(int block, int end, const BlockRange& blocks, bool is_last) {
        O_is_begun = false;
        softmax.reset();
        K.consumer_wait();
        read_entry();
        start_QK_gemm();
        finish_QK_gemm<0, true>();
        output.drain();
        compute_probabilities<true>(block, blocks);
        pack_P();
        send_P();
#pragma unroll 1
        while (++block < end) next_block(block, blocks);
        V.consumer_wait();
        if (!is_last) order.begin_turn();
        start_PV_gemm();
        finish_PV_gemm();
        if (!is_last) order.end_turn();
    }
    // The address is computed each time, so that the loop keeps no register for it.
    FS_DEVICE RunningState<Kernel> running_state() const {
        return RunningState<Kernel>(problem, opaque(warpgroup));
    }

    // An iteration of the main loop whose PV GEMM has few steps: nothing needs to overlap it.
    FS_DEVICE void continue_after_short_block(int block, const BlockRange& blocks, int steps) {
        K.consumer_wait();
        V.consumer_wait();
        order.template wait<PingPong::gemm>();
        run_PV_gemm_of(steps);
        finish_PV_gemm();
        start_QK_gemm();
        order.template arrive<PingPong::gemm>();
        finish_QK_gemm<0, false>();
        compute_probabilities<false>(block, blocks);
        max_policy.finish_P(*this);
        if (rescales_O) softmax.rescale(O, O_factors);
    }

    // ---- short blocks ----

    // How many steps of 16 keys in the warpgroup's last block contain a key visible to any row.
    FS_DEVICE int steps_of_last_block(int block) const {
        if constexpr (!Kernel::has_short_blocks) return Kernel::PV_steps;
        const int end = token_of<Kernel>(args, tile.first_row + kWarpgroupRows);
        const int last = min(end, tile.q_count) - 1;
        const KeyMask<SEMANTICS> visible(problem, tile.q_count, tile.k_count);
        return (visible.keys(last).last - block * Kernel::B_c) / 16 + 1;
    }
    // Whether fewer than all steps suffice.
    FS_DEVICE static bool is_short(int steps) {
        constexpr int kMostSteps = (Kernel::PV_steps - 1) / Kernel::short_steps;
        return steps <= kMostSteps * Kernel::short_steps;
    }
    // Uses the smallest number of steps for which there is code. Each branch waits for its own
    // GEMM: if a GEMM were in flight where the branches join, ptxas would serialize all of the
    // kernel's GEMMs (C7515).
    template <int kSteps = Kernel::short_steps>
    FS_DEVICE void run_QK_gemm_of(int steps) {
        if constexpr (!Kernel::has_short_blocks || kSteps >= Kernel::PV_steps) {
            start_QK_gemm();
            if constexpr (Kernel::has_short_blocks) wgmma_wait<0>(S);
        } else if (steps <= kSteps) {
            start_QK_gemm<kSteps>();
            wgmma_wait<0>(S);
#pragma unroll
            for (int n = 2 * kSteps; n < Kernel::B_c / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) S[0][n][e] = -INFINITY;
        } else {
            run_QK_gemm_of<kSteps + Kernel::short_steps>(steps);
        }
    }
    template <int kSteps = Kernel::short_steps>
    FS_DEVICE void run_PV_gemm_of(int steps) {
        constexpr bool kIsLongest = kSteps + Kernel::short_steps >= Kernel::PV_steps;
        if (kIsLongest || steps <= kSteps) {
            start_PV_gemm<kSteps>();
            wgmma_wait<0>(O);
        } else if constexpr (!kIsLongest) {
            run_PV_gemm_of<kSteps + Kernel::short_steps>(steps);
        }
    }

    // ---- GEMMs ----

    // S = Q K^T, for the first kKeySteps times 16 keys.
    template <int kKeySteps = Kernel::PV_steps>
    FS_DEVICE void start_QK_gemm() {
        using Panel = typename Kernel::Panel;
        using GEMM = Wgmma<typename Kernel::value_t, 16 * kKeySteps, false>;
        auto& scores = reinterpret_cast<typename GEMM::D&>(S);
        // Otherwise the compiler would keep the descriptors of many steps in registers from block
        // to block.
        const auto computed_anew = [](uint32_t tile) {
            return Kernel::QK_steps > 16 ? opaque(tile) : tile;
        };
        const uint64_t q = Panel::descriptor(computed_anew(Q_tile())),
                       k = Panel::descriptor(computed_anew(K.tile()));
        wgmma_fence(S);
        if constexpr (CFG.register_Q > 0) pin(register_Q);
#pragma unroll
        for (int step = 0; step < Kernel::QK_steps; ++step) {
            if (CFG.register_Q > 0 && step % Kernel::register_Q_stride == 0)
                GEMM::run(scores, register_Q[step / Kernel::register_Q_stride],
                          k + Panel::template column_step<Kernel::B_c>(step), step > 0);
            else
                GEMM::run(scores, q + Panel::template column_step<kWarpgroupRows>(step),
                          k + Panel::template column_step<Kernel::B_c>(step), step > 0);
        }
        wgmma_commit();
    }
    // Loads a part of Q into registers, once per tile. Every block's GEMM reads the rest of Q from
    // shared memory.
    FS_DEVICE void load_register_Q() {
        using Panel = typename Kernel::Panel;
#pragma unroll
        for (int i = 0; i < CFG.register_Q; ++i) {
            const int column = i * Kernel::register_Q_stride * 16;
            const uint32_t panel = Q_tile() + column / Panel::kColumns * Kernel::Q_panel_bytes;
            const int chunk = column % Panel::kColumns / 8 + lane / 16;
            ldmatrix_x4(register_Q[i], panel + Panel::offset(warp * kWarpRows + lane % 16, chunk));
        }
    }
    template <int kPending, bool kFirst>
    FS_DEVICE void finish_QK_gemm() {
        wgmma_wait<kPending>(S);
        if constexpr (kFirst || !MaxPolicy::kMayRecompute) K.consumer_release(warp, lane);
    }

    // O += P V, for the first kSteps times 16 keys.
    template <int kSteps = Kernel::PV_steps>
    FS_DEVICE void start_PV_gemm() {
        using Panel = typename Kernel::Panel;
        const uint64_t v = Panel::descriptor(V.tile(), Kernel::KV_panel_bytes);
        wgmma_fence(O, P);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Kernel::GEMM_PV::run(O, P[step], v + Panel::row_step(step), step > 0 || O_is_begun);
        wgmma_commit();
        O_is_begun = true;
    }
    FS_DEVICE void finish_PV_gemm() {
        wgmma_wait<0>(O);
        V.consumer_release(warp, lane);
    }

    // ---- between the GEMMs ----

    // ptxas moves exponentials below a wait for wgmma, but not past the end of a basic block. The
    // branch here ends one. Its condition is that an exponential is NaN, which never happens, but
    // ptxas cannot know that.
    FS_DEVICE static void end_basic_block_after(typename Kernel::S_t& S) {
        pin(S);
        if (__float_as_uint(S[0][Kernel::B_c / 8 - 1][3]) == 0x7fc12345u)
            asm volatile("nanosleep.u32 20;" ::: "memory");
    }

    // Turns a block's scores into probabilities.
    template <bool kFirst>
    FS_DEVICE void compute_probabilities(int block, const BlockRange& blocks) {
        change_scores<SEMANTICS>(S, problem.score_argument);
        if constexpr (Kernel::has_program)
            change_by_program<SEMANTICS>(S, args.program, program_sequence(), lane, place_of_lane(),
                                         head_of_lane(), first_key(block));
        // Without a mask a row sees all keys. Only the block that is processed first, which is the
        // last of the sequence, may have fewer keys.
        constexpr bool kMayCut =
            kFirst || kHidesKeys<SEMANTICS> || Kernel::canonical || Kernel::has_lists;
        if constexpr (Kernel::masked && kMayCut)
            if (needs_mask(block, blocks)) {
                KeyMask<SEMANTICS>(problem, tile.q_count, tile.k_count)
                    .mask(S, lane, token_of_lane(), first_key(block));
                if constexpr (Kernel::has_lists)
                    if (entry.needs_function(tile.group_shift))
                        hide_by_program<SEMANTICS>(S, args.program, program_sequence(), lane,
                                                   place_of_lane(), head_of_lane(),
                                                   first_key(block));
            }
        // If maxima are requested, the maximum of every row must be exact.
        const float threshold =
            SEMANTICS.partial || problem.row_max == nullptr ? CFG.rescale_threshold : 0;
        const bool updates_max = kFirst || max_policy.updates_max(*this, block, blocks);
        if (updates_max)
            rescales_O = softmax.template update_max<kFirst>(S, O_factors, threshold);
        else
            rescales_O = false;
        order.template wait<kFirst ? PingPong::none : PingPong::exp>();
        block_sums = softmax.exponentiate(S);
        order.template arrive<kFirst ? PingPong::none : PingPong::exp>();
        if constexpr (kFirst)
            softmax.template add<true>(block_sums);
        else
            max_policy.add(*this, updates_max);
    }

    // With lists a block is a position in the tile's list. Its entry arrives with K.
    FS_DEVICE void read_entry() {
        if constexpr (Kernel::has_lists) {
            // Only the lane that releases the stage reads the entry.
            uint32_t bits = 0;
            if (lane == 0) bits = load_shared_4B(smem + Kernel::entry_offset + 4 * K.state.stage());
            entry.bits = __shfl_sync(0xffffffffu, bits, 0);
        }
    }
    FS_DEVICE int first_key(int block) const {
        if constexpr (Kernel::has_lists) return entry.block() * Kernel::B_c;
        return block * Kernel::B_c;
    }
    FS_DEVICE bool needs_mask(int block, const BlockRange& blocks) const {
        if constexpr (Kernel::has_lists) return !entry.is_full(tile.group_shift);
        return blocks.needs_mask(block);
    }

    FS_DEVICE void pack_P() {
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step)
            pack_fragment<typename Kernel::value_t>(P[step], S[0][2 * step], S[0][2 * step + 1]);
    }

    // Sends this block's P and factors to the partner.
    FS_DEVICE void send_P() {
        if constexpr (Kernel::halves_O) messages.send(P, rescales_O, O_factors);
    }

    // Sends the partner the weights with which it merges its columns of a chunk.
    FS_DEVICE void send_merge(const StateMerge (&merge)[2]) {
        if constexpr (Kernel::halves_O)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float weights[2];
                merge[r].put(weights);
                messages.send(weights);
            }
    }

    // ---- tiles ----

    FS_DEVICE int slot() const { return Q_state.stage() * Kernel::n_warpgroups + warpgroup; }
    FS_DEVICE uint32_t Q_tile() const {
        return smem + Kernel::Q_offset + slot() * Kernel::Q_tile_bytes;
    }
    FS_DEVICE PipelineBarriers Q_barriers() const { return {smem + Kernel::Q_barriers}; }

    // Waits for the next tile's Q. Returns false after the last tile.
    FS_DEVICE bool receive_tile() {
        mbarrier_wait(Q_barriers().full(slot()), Q_state.phase());
        read_tile_info();
        return tile.is_valid();
    }
    FS_DEVICE void read_tile_info() {
        tile = TileInfoOf<Kernel>::template load<Kernel::info_has_q_count>(
            smem + Kernel::info_offset + slot() * Kernel::info_bytes, problem.seq_q);
    }

    // A row of this lane, within its sequence.
    FS_DEVICE auto row_of_lane() const {
        return [&](int, int r) { return tile.first_row + warp * kWarpRows + 8 * r + lane / 4; };
    }
    FS_DEVICE auto token_of_lane() const {
        return [&](int m, int r) { return token_of<Kernel>(args, row_of_lane()(m, r)); };
    }
    // A row of this lane as a Place. Rows that heads share have no common base.
    FS_DEVICE auto place_of_lane() const {
        return [&](int m, int r) {
            if constexpr (Kernel::packs_gqa) return program::Place(token_of_lane()(m, r));
            return program::Place(row_of_lane()(m, 0), 8 * r);
        };
    }
    FS_DEVICE auto head_of_lane() const {
        return [&](int m, int r) { return head_of<Kernel>(args, tile.head, row_of_lane()(m, r)); };
    }
    FS_DEVICE ProgramSequence program_sequence() const {
        return {tile.batch, tile.q_count, tile.k_count};
    }

    // The tile's blocks that this warpgroup's rows see.
    FS_DEVICE BlockRange blocks_of_warpgroup() const {
        if (tile.first_row >= tile.row_end) return {tile.block_end, tile.block_end, 0, 0};
        if constexpr (!Kernel::masked) return {tile.block_begin, tile.block_end, 0, 0};
        if constexpr (Kernel::has_lists) {
            if (tile.own_begin >= tile.own_end) return {tile.block_end, tile.block_end, 0, 0};
            return {tile.own_begin, tile.own_end, 0, 0};
        }
        BlockRange blocks =
            visible_blocks<Kernel>(KeyMask<SEMANTICS>(problem, tile.q_count, tile.k_count), args,
                                   tile.first_row, kWarpgroupRows);
        if constexpr (Kernel::splits_keys) {
            blocks.begin = max(blocks.begin, tile.block_begin);
            blocks.end = min(blocks.end, tile.block_end);
        }
        if (blocks.begin >= blocks.end) return {tile.block_end, tile.block_end, 0, 0};
        return blocks;
    }

    // Skips blocks that only other warpgroups need.
    FS_DEVICE void skip_blocks(int blocks, int ordered_blocks) {
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            K.consumer_wait();
            K.consumer_release(warp, lane);
            V.consumer_wait();
            V.consumer_release(warp, lane);
            if (i < ordered_blocks) order.wait_and_arrive();
        }
    }

    // Does the part of the softmax that depends only on the scores and not on O. It overlaps the
    // last PV GEMM.
    FS_DEVICE void finalize_rows() {
        read_tile_info();  // a second time, so that it needs no registers during the loop
        if (kFreesQ || is_part()) {
            __syncwarp();  // after this, no lane reads the tile's info any more
            if (lane == 0) mbarrier_arrive(Q_barriers().empty(slot()));
        }
        const float* sinks = SEMANTICS.partial || is_part() ? nullptr : problem.sinks;
        if constexpr (Kernel::packs_gqa)
            softmax.finalize(row_weights, sinks, [&](int m, int r) {
                return head_of<Kernel>(args, tile.head, row_of_lane()(m, r));
            });
        else
            softmax.finalize(row_weights, sinks == nullptr ? nullptr : sinks + tile.head);
        if constexpr (Kernel::halves_O) messages.send(row_weights[0]);
        if constexpr (Kernel::splits_keys) {
            if (is_part()) {
                store_part_statistics();
                return;
            }
        }
        if constexpr (Kernel::packs_gqa)
            softmax.template store_statistics<true, !SEMANTICS.partial>(
                problem, lane, row_of_lane(), tile.row_end, [&](int row) {
                    const int head = head_of<Kernel>(args, tile.head, row);
                    return first_statistic<SEMANTICS>(problem, tile.batch, head) + tile.q_first +
                           token_of<Kernel>(args, row);
                });
        else
            softmax.template store_statistics<true, !SEMANTICS.partial>(
                problem, lane, row_of_lane(), tile.row_end, [&] {
                    if constexpr (Kernel::has_states)
                        return first_statistic<SEMANTICS>(problem, tile.batch, tile.head) +
                               tile.q_first;
                    return tile.batch * problem.lse_batch_stride +
                           tile.head * problem.lse_head_stride + tile.q_first;
                });
    }
    // Whether this tile is a part, whose rows are merged with the rows of other parts.
    FS_DEVICE bool is_part() const {
        if constexpr (Kernel::splits_keys)
            return tile.part_row != kNoPart;
        else
            return false;
    }
    FS_DEVICE void store_part_statistics() const
        requires(Kernel::splits_keys)
    {
        if (lane % 4 != 0) return;
        float2* statistics = part_statistics<Kernel::d_v>(problem) + tile.part_row;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp * kWarpRows + 8 * r + lane / 4;
            if (tile.first_row + row < tile.row_end)
                statistics[row] = {softmax.row_sum[0][r], softmax.row_max[0][r]};
        }
    }
    // Whether O is stored without using Q's slot.
    static constexpr bool kFreesQ = CFG.separate_O || CFG.direct_O || SEMANTICS.partial;

    FS_DEVICE void finish_tile() {
        output.drain();
        softmax.normalize(O, row_weights);
        const uint32_t slot_empty = Q_barriers().empty(slot());
        if (is_part()) {
            if constexpr (Kernel::splits_keys) output.store_part(O, tile, tile.first_row);
        } else if constexpr (SEMANTICS.partial) {
            output.store_fp32(O, tile, tile.first_row);
        } else if constexpr (CFG.direct_O) {
            output.store_directly(O, tile, tile.first_row);
        } else if constexpr (CFG.separate_O) {
            output.start(O, smem + Kernel::O_offset + warpgroup * Kernel::O_tile_bytes, slot_empty,
                         tile, tile.first_row);
        } else {
            order.sync_warpgroup();  // no warp's GEMM reads Q any more
            output.start(O, Q_tile(), slot_empty, tile, tile.first_row);
            if constexpr (CFG.q_buffers == 1) output.drain();
        }
        Q_state.advance();
    }

    // Handles rows that see no block.
    FS_DEVICE void finish_empty_rows() {
        zero(O);
        softmax = decltype(softmax)(problem.scale_log2);
        finalize_rows();
    }
};

}  // namespace flashsmith
