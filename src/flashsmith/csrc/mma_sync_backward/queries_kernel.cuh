// The kernel whose CTAs keep a block of queries. A CTA iterates over the keys that the queries see.
// The CTA computes dq, which is summed in fp32 registers and rounded once. For this, S and dP are
// computed again, which costs two GEMMs but needs neither fp32 sums in memory nor an order of CTAs.
#pragma once

#include "backward/listed_steps.cuh"
#include "backward/program_scores.cuh"
#include "mma_sync_backward/common_parts.cuh"

namespace flashsmith {

template <class Kernel>
struct QueriesBlock {
    static_assert(Kernel::valid_config());
    using value_t = typename Kernel::value_t;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr int kKeyTiles = Kernel::step_keys / 8;
    static constexpr int kKeySteps = Kernel::step_keys / 16;
    static constexpr int kColumnTiles = Kernel::d_head / 8;
    using Scores = float[1][kKeyTiles][4];
    using Layout = typename Kernel::StreamedLayout;
    using ValuesLayout = typename Kernel::StreamedValuesLayout;

    const typename Kernel::Args& args;
    const uint32_t smem;
    const int warp, lane;
    const int batch, head, first_row;
    const SequenceRows q, k;
    const BackwardKeyMask<SEMANTICS> key_mask;
    float lse_log2[2], D[2];  // for rows lane / 4 and lane / 4 + 8 of the warp

    float dq[1][kColumnTiles][4] = {};

    FS_DEVICE QueriesBlock(const typename Kernel::Args& args, uint32_t smem, int batch, int head,
                           int block, SequenceRows q, SequenceRows k)
        : args(args),
          smem(smem),
          warp(thread_index() / kWarpSize),
          lane(thread_index() % kWarpSize),
          batch(batch),
          head(head),
          first_row(block * Kernel::dq_rows),
          q(q),
          k(k),
          key_mask(args, q.count, k.count) {
        const int64_t row = first_statistic<SEMANTICS>(args, batch, head, q.first) + lane_row();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            lse_log2[r] = args.lse_log2[row + 8 * r];
            D[r] = args.D[row + 8 * r];
        }
    }

    FS_DEVICE int lane_row() const { return first_row + 16 * warp + lane / 4; }

    FS_DEVICE void run() {
        const int32_t* list = nullptr;
        BlockRange blocks{};
        if constexpr (Kernel::has_lists) {
            list = key_lists<Kernel>(args, args.program)
                       .list(batch, head, first_row / Kernel::dq_rows);
            blocks.end = list[0];  // blocks is then a range of entries of the list
        } else {
            blocks = key_mask.key_blocks(first_row, Kernel::dq_rows, Kernel::step_keys);
        }
        start_queries();
        if (blocks.begin < blocks.end) start_keys(block_at(list, blocks.begin), 0);
        cp_async_commit();
        int stage = 0;
        for (int place = blocks.begin; place < blocks.end; ++place) {
            cp_async_wait<0>();
            __syncthreads();  // the step's tiles have arrived, and the previous step's are free
            const int next = Kernel::stages == 1 ? 0 : stage ^ 1;
            if constexpr (Kernel::stages > 1) {
                if (place + 1 < blocks.end) start_keys(block_at(list, place + 1), next);
                cp_async_commit();
            }
            bool needs_mask = blocks.needs_mask(place);
            if constexpr (Kernel::has_lists) needs_mask = !entry_at(list, place).is_full(0);
            step(block_at(list, place), stage, needs_mask);
            if constexpr (Kernel::stages == 1) {
                __syncthreads();  // all warps are done with the tiles
                if (place + 1 < blocks.end) start_keys(block_at(list, place + 1), next);
                cp_async_commit();
            }
            stage = next;
        }
        cp_async_wait<0>();
        __syncthreads();  // dq reuses Q's buffer; without steps, only this ends the copy of Q
        store();
    }

    // With lists, `place` is the position of an entry, not of a block.
    FS_DEVICE static BlockEntry entry_at(const int32_t* list, int place) {
        return {list[kBlockListHeader + place]};
    }
    FS_DEVICE static int block_at(const int32_t* list, int place) {
        if constexpr (Kernel::has_lists) return entry_at(list, place).block();
        return place;
    }

    // ---- copies ----

    FS_DEVICE TileExtent extent(int rows) const {
        return {rows, d_of_qk<Kernel>(args) / kChunkElements};
    }
    FS_DEVICE TileExtent extent_of_v(int rows) const {
        return {rows, d_of_v<Kernel>(args) / kChunkElements};
    }

    FS_DEVICE void start_queries() const {
        const typename Kernel::CopyResident copy(thread_index());
        const TileExtent present = extent(q.count - first_row);
        copy.global_to_shared_async(
            smem + Kernel::resident_Q_offset,
            row_address<value_t>(args.q, batch * args.q_batch_stride + head * args.q_head_stride,
                                 q.first + first_row, args.q_seq_stride),
            args.q_seq_stride * int64_t{sizeof(value_t)}, present);
        const auto start_do = [&](const auto& copy, TileExtent present) {
            copy.global_to_shared_async(
                smem + Kernel::resident_do_offset,
                row_address<value_t>(args.d_o,
                                     batch * args.do_batch_stride + head * args.do_head_stride,
                                     q.first + first_row, args.do_seq_stride),
                args.do_seq_stride * int64_t{sizeof(value_t)}, present);
        };
        if constexpr (Kernel::is_pair)
            start_do(typename Kernel::CopyResidentDo(thread_index()),
                     extent_of_v(q.count - first_row));
        else
            start_do(copy, present);
    }

    FS_DEVICE uint32_t K_tile(int stage) const {
        return smem + Kernel::streamed_K_offset + stage * Layout::kBytes;
    }
    FS_DEVICE uint32_t V_tile(int stage) const {
        return smem + Kernel::streamed_V_offset + stage * ValuesLayout::kBytes;
    }

    FS_DEVICE void start_keys(int block, int stage) const {
        const typename Kernel::CopyStreamed copy(thread_index());
        const int head_k = head / (args.heads_q / args.heads_k);
        const int first_key = block * Kernel::step_keys;
        const TileExtent present = extent(k.count - first_key);
        copy.global_to_shared_async(
            K_tile(stage),
            row_address<value_t>(args.k, batch * args.k_batch_stride + head_k * args.k_head_stride,
                                 k.first + first_key, args.k_seq_stride),
            args.k_seq_stride * int64_t{sizeof(value_t)}, present);
        const auto start_V = [&](const auto& copy, TileExtent present) {
            copy.global_to_shared_async(
                V_tile(stage),
                row_address<value_t>(args.v,
                                     batch * args.v_batch_stride + head_k * args.v_head_stride,
                                     k.first + first_key, args.v_seq_stride),
                args.v_seq_stride * int64_t{sizeof(value_t)}, present);
        };
        if constexpr (Kernel::is_pair)
            start_V(typename Kernel::CopyStreamedValues(thread_index()),
                    extent_of_v(k.count - first_key));
        else
            start_V(copy, present);
    }

    // ---- the algorithm ----

    FS_DEVICE void step(int block, int stage, bool needs_mask) {
        Scores S, dP;
        zero(S);
        multiply<value_t, Kernel::d_steps>(S, Q_rows(), RowsB<Layout>(K_tile(stage), lane));
        zero(dP);
        multiply<value_t, Kernel::d_v_steps>(dP, do_rows(),
                                             RowsB<ValuesLayout>(V_tile(stage), lane));
        change_scores<SEMANTICS>(S, args.score_argument);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float score = changed(S, block, n, e);
                const float P = exp2_approx(fmaf(score, args.scale_log2, -lse_log2[e / 2]));
                dP[0][n][e] =
                    BackwardProgram<SEMANTICS>::gradient(P, S[0][n][e]) * (dP[0][n][e] - D[e / 2]);
            }
        if constexpr (Kernel::masked)
            if (needs_mask) mask(dP, block);
        if constexpr (SEMANTICS.program_masks)
            if (needs_mask) program().hide(dP, query_of_lane(), key_of_lane(block));
        InRegisters<1, kKeySteps> dS;
        round_to<value_t>(dS, dP);
        multiply<value_t, kKeySteps>(dq, dS, ColumnsB<Layout, 1>(K_tile(stage), lane));
    }

    using ResidentRows = RowsA<typename Kernel::ResidentLayout, 1>;
    using ResidentDoRows = RowsA<typename Kernel::ResidentDoLayout, 1>;
    FS_DEVICE ResidentRows Q_rows() const {
        return ResidentRows(smem + Kernel::resident_Q_offset, lane, 16 * warp);
    }
    FS_DEVICE ResidentDoRows do_rows() const {
        return ResidentDoRows(smem + Kernel::resident_do_offset, lane, 16 * warp);
    }

    // The score that enters the softmax. With a score function S becomes the function's slope.
    FS_DEVICE float changed(Scores& S, int block, int n, int e) const {
        if constexpr (Kernel::has_program)
            return program().change(S[0][n][e], query_of_lane()(0, n, e),
                                    key_of_lane(block)(0, n, e));
        else
            return S[0][n][e];
    }
    FS_DEVICE BackwardProgram<SEMANTICS> program() const {
        return {args.program, batch, head, q.count, k.count};
    }
    FS_DEVICE auto query_of_lane() const {
        return [first = lane_row()](int, int, int e) { return program::Place{first, 8 * (e / 2)}; };
    }
    FS_DEVICE auto key_of_lane(int block) const {
        const int first = block * Kernel::step_keys + lane % 4 * 2;
        return [first](int, int n, int e) { return program::Place{first, 8 * n + e % 2}; };
    }

    // Zeroes elements of keys that a query does not see, whatever their values.
    FS_DEVICE void mask(Scores& dS, int block) const {
        const auto seen = [&](int, int r) { return key_mask.keys(lane_row() + 8 * r); };
        mask_keys<SEMANTICS>(dS, lane, block * Kernel::step_keys, seen, 0.0f);
    }

    // ---- the epilogue ----

    FS_DEVICE void store() {
        // If a key is NaN, the sums of rows that see no key are 0 times NaN, so they are replaced.
        if constexpr (Kernel::masked)
#pragma unroll
            for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (lane_row() + e / 2 * 8 < key_mask.first_attending_row() ||
                        (Kernel::has_program && lse_log2[e / 2] == INFINITY))
                        dq[0][n][e] = 0.0f;
        const int64_t origin = batch * args.dq_batch_stride + head * args.dq_head_stride;
        const int rows = q.count - first_row;
        if (args.grads_fp32) {
            float* const first =
                static_cast<float*>(args.dq) + origin + (q.first + first_row) * args.dq_seq_stride;
            store_fp32_gradient<1>(first, args.dq_seq_stride, rows, d_of_qk<Kernel>(args), dq,
                                   args.scale, 16 * warp, 0, lane);
            return;
        }
        // A warp's dq overwrites its own rows of Q.
        using ResidentLayout = typename Kernel::ResidentLayout;
        const uint32_t tile = smem + Kernel::resident_Q_offset;
        stage_gradient<ResidentLayout, value_t, 1>(tile, dq, args.scale, 16 * warp, 0, lane);
        __syncwarp();
        char* const first = const_cast<char*>(
            row_address<value_t>(args.dq, origin, q.first + first_row, args.dq_seq_stride));
        typename Kernel::CopydQ(lane, 16 * warp)
            .shared_to_global(first, tile, args.dq_seq_stride * int64_t{sizeof(value_t)},
                              extent(rows));
    }
};

// Computes dq for configs whose main kernel does not add to it.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads)
    backward_queries_kernel(const typename Kernel::Args args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const int n_blocks = (args.seq_q + Kernel::dq_rows - 1) / Kernel::dq_rows;
    const uint32_t sequence = block_index() / n_blocks;
    int block = block_index() % n_blocks;
    // In a causal head, the last rows see the most keys. They begin first, so that no long CTA is
    // left at the end.
    if constexpr (kTriangular<Kernel::SEMANTICS>) block = n_blocks - 1 - block;
    const int batch = sequence / args.heads_q, head = sequence % args.heads_q;
    constexpr bool kPacked = Kernel::SEMANTICS.packed;
    const SequenceRows q =
        sequence_rows<kPacked>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
    const SequenceRows k =
        sequence_rows<kPacked>(args.cu_seqlens_k, batch, args.seq_k, args.total_k);
    if (kPacked && block * Kernel::dq_rows >= q.count) return;
    QueriesBlock<Kernel>(args, shared_address(shared_memory), batch, head, block, q, k).run();
}

}  // namespace flashsmith
