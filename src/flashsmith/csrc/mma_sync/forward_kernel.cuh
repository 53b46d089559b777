// The FlashAttention-2 forward pass on mma.sync: one CTA computes one Q block of one head.
#pragma once

#include "common/block_lists.cuh"
#include "common/changed_scores.cuh"
#include "common/split_keys.cuh"
#include "mma_sync/static_kernel_configuration.cuh"

namespace flashsmith {

// The part of the problem that a thread works on.
//
// Batch and heads share the one grid dimension that is not limited to 65,535. The Q blocks of a
// head run concurrently, so that its K and V are read from DRAM only once. Each instance reads the
// special registers again, because values kept over the loop would cost registers, and kernels with
// 32 rows per warp have none to spare.
template <class Kernel>
struct TileCoord {
    int warp, lane, Q_block, batch;
    int head;   // a query head; with pack_gqa a key head, whose query heads are the rows
    int group;  // rows per token
    SequenceRows q, k;

    FS_DEVICE explicit TileCoord(const ForwardKernelArgs& args)
        : warp(thread_index() / kWarpSize), lane(thread_index() % kWarpSize) {
        find(args, tile_of_block(args));
    }
    FS_DEVICE TileCoord(const ForwardKernelArgs& args, uint32_t tile) : warp(0), lane(0) {
        find(args, tile);
    }

    FS_DEVICE void find(const ForwardKernelArgs& args, uint32_t block) {
        uint32_t first = 0, heads = 1;
        if constexpr (Kernel::groups_heads) {
            // Within a group of heads, all heads' first blocks come before any head's second.
            const uint32_t group_blocks = args.heads_per_group * args.n_Q_blocks;
            first = block / group_blocks * args.heads_per_group;
            block %= group_blocks;
            heads = min(args.heads_per_group, args.batch * tiled_heads(args) - int(first));
        }
        const uint32_t sequence = first + (heads == 1 ? block / args.n_Q_blocks : block % heads);
        Q_block = heads == 1 ? block % args.n_Q_blocks : block / heads;
        // The last rows of a causal head see the most keys. Starting with them leaves no long CTA
        // at the end.
        if constexpr (kTriangular<Kernel::SEMANTICS>) Q_block = args.n_Q_blocks - 1 - Q_block;
        batch = sequence / tiled_heads(args);
        head = sequence % tiled_heads(args);
        group = Kernel::packs_gqa ? args.heads_q / args.heads_k : 1;
        q = sequence_rows<Kernel::SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q,
                                                    args.total_q);
        k = key_rows<Kernel::SEMANTICS>(args, batch);
    }
    // Number of heads that have separate tiles.
    FS_DEVICE static int tiled_heads(const ForwardKernelArgs& args) {
        return Kernel::packs_gqa ? args.heads_k : args.heads_q;
    }
    // Whole tiles come first, then the parts of split tiles.
    FS_DEVICE static uint32_t tile_of_block(const ForwardKernelArgs& args) {
        const uint32_t block = block_index();
        if constexpr (Kernel::splits_keys)
            if (block >= args.n_whole_tiles)
                return args.n_whole_tiles + (block - args.n_whole_tiles) / Kernel::CFG.split_keys;
        return block;
    }
    FS_DEVICE int rows() const { return q.count * group; }                      // in the sequence
    FS_DEVICE int first_row() const { return Q_block * Kernel::B_r; }           // of the Q block
    FS_DEVICE int warp_row() const { return warp * Kernel::N::rows_per_warp; }  // in the Q block
    FS_DEVICE int lane_row(int m, int r) const { return warp_row() + 16 * m + 8 * r + lane / 4; }
    // The token in the sequence, and the query head, of a row of the sequence.
    FS_DEVICE int token(int row) const { return Kernel::packs_gqa ? row / group : row; }
    FS_DEVICE int head_of(int row) const {
        return Kernel::packs_gqa ? head * group + row % group : head;
    }
};

// The call's widths.
template <class Kernel>
FS_DEVICE int d_of_qk(const ForwardKernelArgs& args) {
    return Kernel::CFG.d_v > 0 ? args.widths.qk : args.d;
}
template <class Kernel>
FS_DEVICE int d_of_v(const ForwardKernelArgs& args) {
    return Kernel::CFG.d_v > 0 ? args.widths.v : args.d;
}

// The lists of K/V blocks that a call's Q blocks visit.
template <class Kernel>
FS_DEVICE BlockLists<Kernel::SEMANTICS> block_lists(const typename Kernel::Args& args) {
    return {args, args.program.lists, static_cast<uint32_t>(args.n_Q_blocks), args.n_KV_blocks};
}

// The part of the problem that a CTA computes, with the steps of its loop in the order of
// execution.
template <class Kernel>
struct ForwardBlock {
    static_assert(Kernel::valid_config());
    using N = typename Kernel::N;
    using value_t = typename Kernel::value_t;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;

    const typename Kernel::Args& args;
    const char *q, *k, *v;  // the Q block, and the first K and V rows of this sequence and head
    uint32_t smem;
    int Q_rows, K_rows;  // how many rows q and k have from these addresses on
    KeyMask<SEMANTICS> visible;
    const int32_t* list;  // with lists: the Q block's list; block numbers are then positions in it

    typename Kernel::Q_t Q;
    typename Kernel::K_t K;
    typename Kernel::V_t V;
    typename Kernel::Softmax softmax;
    typename Kernel::O_accum_t O = {};

    FS_DEVICE ForwardBlock(const typename Kernel::Args& args, uint32_t smem,
                           const TileCoord<Kernel>& at)
        : args(args),
          smem(smem),
          Q_rows(at.rows() - at.first_row()),
          K_rows(at.k.count),
          visible(args, at.q.count, at.k.count),
          Q(smem + Kernel::Q_offset, at.lane, at.warp_row()),
          K(smem + Kernel::K_offset, at.lane),
          V(smem + Kernel::V_offset, at.lane),
          softmax(args.scale_log2) {
        if constexpr (Kernel::has_lists)
            list = block_lists<Kernel>(args).list(at.batch, at.head, at.Q_block);
        const int head_k = Kernel::packs_gqa ? at.head : at.head / (args.heads_q / args.heads_k);
        q = origin(args.q, at.batch * args.q_batch_stride + at.head_of(0) * args.q_head_stride +
                               (at.q.first + first_even_row(at)) * args.q_seq_stride);
        k = origin(args.k, at.batch * args.k_batch_stride + head_k * args.k_head_stride +
                               at.k.first * args.k_seq_stride);
        v = origin(args.v, at.batch * args.v_batch_stride + head_k * args.v_head_stride +
                               at.k.first * args.v_seq_stride);
    }

    // ---- copies ----

    FS_DEVICE void start_Q() {
        start_copy<typename Kernel::CopyQ>(
            smem + Kernel::Q_offset, q,
            query_rows(args.q_seq_stride, args.q_head_stride, sizeof(value_t)), Q_rows,
            d_of_qk<Kernel>(args));
    }
    FS_DEVICE void start_K(int position, uint32_t stage = 0) {
        const int block = block_at(position);
        start_copy<typename Kernel::CopyK>(
            smem + Kernel::K_offset + stage,
            k + row_bytes(int64_t{block} * Kernel::B_c, args.k_seq_stride),
            row_bytes(1, args.k_seq_stride), K_rows - block * Kernel::B_c, d_of_qk<Kernel>(args));
    }
    FS_DEVICE void start_V(int position, uint32_t stage = 0) {
        const int block = block_at(position);
        start_copy<typename Kernel::CopyV>(
            smem + Kernel::V_offset + stage,
            v + row_bytes(int64_t{block} * Kernel::B_c, args.v_seq_stride),
            row_bytes(1, args.v_seq_stride), K_rows - block * Kernel::B_c, d_of_v<Kernel>(args));
    }
    // Closes a group of copies that are waited for together. Empty groups count, too, so that
    // groups correspond to blocks.
    FS_DEVICE void commit_copies() {
        if constexpr (Kernel::async_copy) cp_async_commit();
    }
    // Waits for this thread's copies, except copies of the last `kPending` groups.
    template <int kPending = 0>
    FS_DEVICE void wait_for_copies() {
        if constexpr (Kernel::async_copy) cp_async_wait<kPending>();
    }
    // Waits for the copies of all threads, which are then visible to the whole CTA.
    template <int kPending = 0>
    FS_DEVICE void finish_copies() {
        wait_for_copies<kPending>();
        __syncthreads();
    }

    // ---- lists ----

    FS_DEVICE BlockEntry entry(int position) const { return {list[kBlockListHeader + position]}; }
    FS_DEVICE int block_at(int position) const {
        if constexpr (Kernel::has_lists) return entry(position).block();
        return position;
    }
    FS_DEVICE bool needs_mask(int position, const BlockRange& blocks) const {
        if constexpr (Kernel::has_lists) return !entry(position).is_full(0);
        return blocks.needs_mask(position);
    }

    // ---- the algorithm ----

    FS_DEVICE void run() {
        BlockRange blocks = visible_blocks();
        if constexpr (Kernel::splits_keys)
            if (is_part()) blocks = part_of<Kernel::CFG.split_keys>(blocks, part());
        if ((!Kernel::masked && !Kernel::splits_keys) || blocks.begin < blocks.end)
            Kernel::MainLoop::run(*this, blocks);
        const TileCoord<Kernel> at(args);
        float weights[N::m_tiles][2];
        const bool no_sinks = SEMANTICS.partial || is_part() || args.sinks == nullptr;
        if constexpr (Kernel::packs_gqa)
            softmax.finalize(weights, no_sinks ? nullptr : args.sinks, [&](int m, int r) {
                return at.head_of(at.first_row() + at.lane_row(m, r));
            });
        else
            softmax.finalize(weights, no_sinks ? nullptr : args.sinks + at.head);
        softmax.normalize(O, weights);
        if (is_part()) {
            store_part(at);
            return;
        }
        const auto row = [&](int m, int r) { return at.lane_row(m, r); };
        if constexpr (Kernel::packs_gqa)
            softmax.template store_statistics<SEMANTICS.uneven, !SEMANTICS.partial>(
                args, at.lane, row, Q_rows, [&](int tile_row) {
                    const int row = at.first_row() + tile_row;
                    return first_statistic<SEMANTICS>(args, at.batch, at.head_of(row)) +
                           at.q.first + at.token(row);
                });
        else
            softmax.template store_statistics<SEMANTICS.uneven, !SEMANTICS.partial>(
                args, at.lane, row, Q_rows, [&] {
                    if constexpr (Kernel::splits_keys)
                        return first_statistic<SEMANTICS>(args, at.batch, at.head) + at.q.first +
                               at.first_row();
                    return at.batch * args.lse_batch_stride + at.head * args.lse_head_stride +
                           at.q.first + at.first_row();
                });
        if constexpr (SEMANTICS.partial)
            store_O_fp32(at);
        else
            store_O(at);
    }

    // S = Q K^T with the K tile at `stage`, which is the tile's distance in bytes from the first K
    // tile.
    FS_DEVICE void QK_gemm(typename Kernel::S_accum_t& S, uint32_t stage = 0) {
        zero(S);
        K.loader.stage = stage;
        Kernel::GEMM_QK::run(S, Q, K);
    }
    FS_DEVICE void PV_gemm(typename Kernel::P_t& P, uint32_t stage = 0) {
        V.loader.stage = stage;
        Kernel::GEMM_PV::run(O, P, V);
    }
    // Converts a block's scores to probabilities. kMask: the block may be partly masked.
    template <bool kMask, bool kFirst>
    FS_DEVICE void compute_probabilities(typename Kernel::S_accum_t& S, int position,
                                         const BlockRange& blocks) {
        change_scores<SEMANTICS>(S, args.score_argument);
        const int first_key = block_at(position) * Kernel::B_c;
        if constexpr (Kernel::has_program)
            with_coordinates([&](const auto&... at) {
                change_by_program<SEMANTICS>(S, args.program, at..., first_key);
            });
        if constexpr (Kernel::masked && kMask)
            if (Kernel::trim_masks || needs_mask(position, blocks)) {
                const TileCoord<Kernel> at(args);
                const auto row = [&](int m, int r) {
                    return at.token(at.first_row() + at.lane_row(m, r));
                };
                visible.mask(S, at.lane, row, first_key);
                if constexpr (Kernel::has_lists)
                    if (entry(position).needs_function(0))
                        with_coordinates([&](const auto&... at) {
                            hide_by_program<SEMANTICS>(S, args.program, at..., first_key);
                        });
            }
        if constexpr (Kernel::canonical)
            softmax.update(S, O);
        else
            softmax.template update<kFirst>(S, O);
    }

    // Calls `function` with the coordinates of this lane's scores, which a program needs.
    template <class Function>
    FS_DEVICE void with_coordinates(const Function& function) const {
        const TileCoord<Kernel> at(args);
        const auto tile_row = [&](int m, int r) { return at.first_row() + at.lane_row(m, r); };
        function(
            ProgramSequence{at.batch, at.q.count, at.k.count}, at.lane,
            [&](int m, int r) {
                if constexpr (Kernel::packs_gqa) return program::Place(at.token(tile_row(m, r)));
                return program::Place(tile_row(0, 0), 16 * m + 8 * r);
            },
            [&](int m, int r) { return at.head_of(tile_row(m, r)); });
    }

    // ---- chunks, in canonical kernels ----

    FS_DEVICE void start_chunk() {
        softmax.reset();
        zero(O);
    }
    // Merges the chunk into the state of all chunks so far. `merges`: there was an earlier chunk.
    FS_DEVICE void finish_chunk(bool merges) {
        softmax.finish_chunk();
        if (!merges) return;
#pragma unroll
        for (int m = 0; m < N::m_tiles; ++m) {
            const uint4 rows = load_shared_16B(state(m, N::PV_n_tiles));
            const StateMerge merge[2] = {
                softmax.merge_after(m, 0, __uint_as_float(rows.x), __uint_as_float(rows.z)),
                softmax.merge_after(m, 1, __uint_as_float(rows.y), __uint_as_float(rows.w))};
#pragma unroll
            for (int n = 0; n < N::PV_n_tiles; ++n) {
                const uint4 before = load_shared_16B(state(m, n));
                O[m][n][0] = merge[0].merged(__uint_as_float(before.x), O[m][n][0]);
                O[m][n][1] = merge[0].merged(__uint_as_float(before.y), O[m][n][1]);
                O[m][n][2] = merge[1].merged(__uint_as_float(before.z), O[m][n][2]);
                O[m][n][3] = merge[1].merged(__uint_as_float(before.w), O[m][n][3]);
            }
        }
    }
    FS_DEVICE void save_state() const {
#pragma unroll
        for (int m = 0; m < N::m_tiles; ++m) {
            save_4(m, N::PV_n_tiles, softmax.row_max[m][0], softmax.row_max[m][1],
                   softmax.row_sum[m][0], softmax.row_sum[m][1]);
#pragma unroll
            for (int n = 0; n < N::PV_n_tiles; ++n)
                save_4(m, n, O[m][n][0], O[m][n][1], O[m][n][2], O[m][n][3]);
        }
    }
    // The address at which this thread saves its n-th group of four floats for the rows of tile m.
    FS_DEVICE uint32_t state(int m, int n) const {
        return smem + Kernel::state_offset +
               ((m * (N::PV_n_tiles + 1) + n) * Kernel::n_threads + thread_index()) * 16;
    }
    FS_DEVICE void save_4(int m, int n, float a, float b, float c, float d) const {
        store_shared_16B(state(m, n), {__float_as_uint(a), __float_as_uint(b), __float_as_uint(c),
                                       __float_as_uint(d)});
    }
    FS_DEVICE static void pack_P(typename Kernel::P_t& P, const typename Kernel::S_accum_t& S) {
#pragma unroll
        for (int k = 0; k < N::PV_k_steps; ++k)
#pragma unroll
            for (int m = 0; m < N::m_tiles; ++m)
                pack_fragment<value_t>(P.fragments[k][m], S[m][2 * k], S[m][2 * k + 1]);
    }
    // Whether any row of this warp sees a key of the block.
    FS_DEVICE bool sees(int block) const {
        if constexpr (Kernel::has_lists) return true;
        const TileCoord<Kernel> at(args);
        const int row = at.first_row() + at.warp_row();
        return visible.keys(at.token(row)).first < (block + 1) * Kernel::B_c &&
               visible.keys(at.token(row + N::rows_per_warp - 1)).last >= block * Kernel::B_c;
    }

    // ---- the epilogue ----

    // O goes through the warp's rows of Q's tile, and from there to memory in whole 16-byte chunks.
    // No other warp reads these rows.
    FS_DEVICE void store_O(const TileCoord<Kernel>& at) {
        // All lanes must have finished reading Q. Without a ring, a barrier of the whole CTA has
        // already ensured this.
        if constexpr (Kernel::kv_stages > 0 || Kernel::canonical) __syncwarp();
        const uint32_t tile = smem + Kernel::Q_offset;
        const typename Kernel::OLayout::Cursor cursor(tile, at.warp_row() + at.lane / 4, 0,
                                                      at.lane % 4 * 4);
#pragma unroll
        for (int m = 0; m < N::m_tiles; ++m)
#pragma unroll
            for (int n = 0; n < N::PV_n_tiles; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    store_shared_4B(cursor.at(16 * m + 8 * r, n),
                                    pack_16bit<value_t>(O[m][n][2 * r], O[m][n][2 * r + 1]));
        __syncwarp();
        char* o = const_cast<char*>(
            origin(args.o, at.batch * args.o_batch_stride + at.head_of(0) * args.o_head_stride +
                               (at.q.first + first_even_row(at)) * args.o_seq_stride));
        typename Kernel::CopyO(at.lane, at.warp_row())
            .shared_to_global(o, tile,
                              query_rows(args.o_seq_stride, args.o_head_stride, sizeof(value_t)),
                              TileExtent{Q_rows, d_of_v<Kernel>(args) / kChunkElements});
    }

    // Stores O unrounded, directly from registers.
    FS_DEVICE void store_O_fp32(const TileCoord<Kernel>& at) const {
        auto* o = static_cast<float*>(args.o) + at.batch * args.o_batch_stride +
                  at.head_of(0) * args.o_head_stride +
                  (at.q.first + first_even_row(at)) * args.o_seq_stride + at.lane % 4 * 2;
        store_rows(at, o, query_rows(args.o_seq_stride, args.o_head_stride, 1));
    }

    // Stores O to the rows of a part, together with the rows' statistics.
    FS_DEVICE void store_part(const TileCoord<Kernel>& at) const {
        const int64_t first = int64_t{block_index() - args.n_whole_tiles} * Kernel::B_r;
        store_rows(at, args.parts + first * Kernel::d_v + at.lane % 4 * 2, int64_t{Kernel::d_v});
        if (at.lane % 4 != 0) return;
        float2* statistics = part_statistics<Kernel::d_v>(args) + first;
#pragma unroll
        for (int m = 0; m < N::m_tiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = at.lane_row(m, r);
                if (row < Q_rows) statistics[row] = {softmax.row_sum[m][r], softmax.row_max[m][r]};
            }
    }

  private:
    // Whether the CTA computes a part of its tile's keys, and which one. This is computed again at
    // every call, like TileCoord, because no register is left for it.
    FS_DEVICE bool is_part() const {
        return Kernel::splits_keys && block_index() >= args.n_whole_tiles;
    }
    FS_DEVICE int part() const
        requires(Kernel::splits_keys)
    {
        return (block_index() - args.n_whole_tiles) % Kernel::CFG.split_keys;
    }

    // Four lanes write 32 bytes of a row, a whole sector. `o` is the address of this lane's columns
    // in the Q block's first row.
    template <class Rows>
    FS_DEVICE void store_rows(const TileCoord<Kernel>& at, float* o, Rows rows) const {
#pragma unroll
        for (int m = 0; m < N::m_tiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = at.lane_row(m, r);
                if (row >= Q_rows) continue;
#pragma unroll
                for (int n = 0; n < N::PV_n_tiles; ++n)
                    if (8 * n < d_of_v<Kernel>(args))
                        store_global_8B(o + row_offset(rows, row) + 8 * n,
                                        float2{O[m][n][2 * r], O[m][n][2 * r + 1]});
            }
    }

    // K/V blocks visible to any row of the Q block.
    FS_DEVICE BlockRange visible_blocks() const {
        if constexpr (Kernel::has_lists) return {0, list[0], 0, 0};
        const TileCoord<Kernel> at(args);
        const int first = at.first_row();
        if constexpr (!Kernel::packs_gqa) return visible.blocks(first, Kernel::B_r, Kernel::B_c);
        const int tokens = at.token(first + Kernel::B_r - 1) - at.token(first) + 1;
        return visible.blocks(at.token(first), tokens, Kernel::B_c);
    }

    // Row steps of q and o, in units of `unit` bytes per stride element. The first row is the Q
    // block's row 0 or, if rows are the heads of a group, the sequence's first row.
    FS_DEVICE auto query_rows(int64_t seq_stride, int64_t head_stride, int64_t unit) const {
        if constexpr (Kernel::packs_gqa) {
            const TileCoord<Kernel> at(args);
            return GroupRows{at.first_row(), at.group, seq_stride * unit, head_stride * unit};
        } else {
            return seq_stride * unit;
        }
    }
    FS_DEVICE static int first_even_row(const TileCoord<Kernel>& at) {
        return Kernel::packs_gqa ? 0 : at.first_row();
    }
    FS_DEVICE static const char* origin(const void* tensor, int64_t elements) {
        return static_cast<const char*>(tensor) + elements * int64_t{sizeof(value_t)};
    }
    FS_DEVICE static int64_t row_bytes(int64_t rows, int64_t seq_stride) {
        return rows * seq_stride * int64_t{sizeof(value_t)};
    }

    template <class Copy, class Rows>
    FS_DEVICE void start_copy(uint32_t tile, const char* gmem, Rows steps, int rows, int columns) {
        const Copy copy(thread_index());
        const TileExtent extent{rows, columns / kChunkElements};
        if constexpr (Kernel::async_copy)
            copy.global_to_shared_async(tile, gmem, steps, extent);
        else
            copy.global_to_shared(tile, gmem, steps, extent);
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads, Kernel::min_ctas_per_sm)
    flash_forward_kernel(const typename Kernel::Args args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const TileCoord<Kernel> at(args);
    // In a packed batch, every sequence has as many Q blocks as the longest one needs.
    if (Kernel::SEMANTICS.packed && at.first_row() >= at.rows()) return;
    ForwardBlock<Kernel>(args, shared_address(shared_memory), at).run();
}

// These kernels write the lists of K/V blocks, and run before the main kernel: see
// common/block_lists.cuh.
template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    flash_list_blocks_kernel(const typename Kernel::Args args) {
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    block_lists<Kernel>(args).enter_bits([&](const auto& tile, int block) {
        const SequenceRows q = sequence_rows<SEMANTICS.packed>(args.cu_seqlens_q, tile.batch,
                                                               args.seq_q, args.total_q);
        const SequenceRows k = key_rows<SEMANTICS>(args, tile.batch);
        const int first_row = tile.tile_of_head * Kernel::B_r;
        const int row_end = min(first_row + Kernel::B_r, q.count);
        const BlockRange range = KeyMask<SEMANTICS>(args, q.count, k.count)
                                     .blocks(first_row, row_end - first_row, Kernel::B_c);
        return bits_of_keys<SEMANTICS, 1, Kernel::B_r, Kernel::B_c>(
            args, args.program, {tile.batch, q.count, k.count}, tile.head, first_row, row_end,
            block, range);
    });
}
template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    flash_compact_lists_kernel(const typename Kernel::Args args) {
    block_lists<Kernel>(args).template compact<1>();
}

// The second launch of kernels that split keys: merges the parts of split tiles.
template <class Kernel>
__global__ void __launch_bounds__(kPartMergeThreads)
    flash_merge_kernel(const typename Kernel::Args args) {
    const MergeThread<Kernel> thread;
    if (thread.tile * Kernel::CFG.split_keys * Kernel::B_r >= args.part_rows) return;
    const TileCoord<Kernel> at(args, args.n_whole_tiles + thread.tile);
    const int row = at.first_row() + thread.tile_row;
    if (row >= at.rows() || thread.column >= d_of_v<Kernel>(args)) return;
    merge_parts<Kernel>(
        args,
        {.part_row = thread.tile * Kernel::CFG.split_keys * Kernel::B_r + thread.tile_row,
         .batch = at.batch,
         .head = at.head_of(row),
         .row = at.token(row),
         .q_first = int(at.q.first)},
        thread.column);
}

}  // namespace flashsmith
