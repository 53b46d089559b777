// A part: all 16 rows of the tile, over some of the keys, by four warps.
//
// A warp has 16 columns of every panel of 64 columns of O. It computes the scores of half of a
// block's keys, over half of the columns. The registers that O leaves could not hold more columns
// of Q. All warps then add these shares of the scores in the same order, and compute all
// probabilities. So all warps have the same maxima and sums.
#pragma once

#include "common/code_fragments.cuh"
#include "common/program_scores.cuh"
#include "common/softmax.cuh"
#include "common/warp_mma.cuh"
#include "mla/row_scale.cuh"
#include "mma_sync_mla/block_copies.cuh"

namespace flashsmith {

template <class Kernel>
struct MlaPart {
    static_assert(Kernel::valid_config());
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr int kScoreTiles = Kernel::B_c / 8, kOwnTiles = kScoreTiles / 2;
    static constexpr int kPanelSteps = Kernel::panel_columns / 16;
    using value_t = typename Kernel::value_t;
    using Layout = typename Kernel::Layout;
    using Softmax = OnlineSoftmax<1, true, Kernel::CFG.lazy_rescale>;

    const MlaTile<Kernel>& tile;
    const typename Kernel::Args& args;
    const uint32_t smem;
    const int warp, lane;
    Softmax softmax;
    typename Kernel::Q_t Q;
    typename Kernel::S_t S;
    typename Kernel::O_t O;

    FS_DEVICE MlaPart(const MlaTile<Kernel>& tile, uint32_t smem)
        : tile(tile),
          args(static_cast<const typename Kernel::Args&>(tile.args)),
          smem(smem),
          warp(__shfl_sync(0xffffffffu, thread_index() / kWarpSize, 0)),
          lane(lane_index()),
          softmax(SEMANTICS.program_scores ? args.scale_log2 : score_factor(args)) {}

    // ---- the algorithm ----

    FS_DEVICE void run(int part) {
        const BlockRange blocks = tile.of_part(part);
        MlaBlockCopies<Kernel> copies(tile, blocks, smem);
#pragma unroll 1
        for (int i = 0; i < Kernel::stages - 1; ++i) copies.start(i);
        load_Q();
        zero(O);
        const int count = blocks.end - blocks.begin;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            cp_async_wait<Kernel::stages - 2>();
            __syncthreads();  // the block has arrived, and all warps have read the previous one
            copies.start(i + Kernel::stages - 1);
            const uint32_t block = smem + Kernel::K_offset + i % Kernel::stages * Layout::kBytes;
            share_scores(block);
            __syncthreads();  // all shares have arrived
            add_scores();
            if constexpr (kHasProgram<SEMANTICS>)
                with_program(blocks.begin + i,
                             [&](const auto&... at) { change_by_program<SEMANTICS>(S, at...); });
            if (blocks.needs_mask(blocks.begin + i)) mask(blocks.begin + i);
            if constexpr (kHasProgram<SEMANTICS>)
                with_program(blocks.begin + i,
                             [&](const auto&... at) { hide_by_program<SEMANTICS>(S, at...); });
            softmax.template update<false>(S, O);
            add_values(block);
        }
        cp_async_wait<0>();
        finish(part);
    }

    // ---- the scores ----

    FS_DEVICE int key_half() const { return warp / 2; }
    FS_DEVICE int column_half() const { return warp % 2; }

    // The warp's keys, as an operand that begins at the warp's columns of the first panel.
    FS_DEVICE auto own_keys(uint32_t block) const {
        constexpr int kHalf = Kernel::Panel::kChunks / 2;
        const int first = key_half() * Kernel::B_c / 2;
        if constexpr (Kernel::has_codes)
            return CodeRowsB<Layout, value_t, Kernel::cache>(block, lane, first,
                                                             kHalf * column_half());
        else
            return RowsB<Layout>(block, lane, first, kHalf * column_half());
    }

    // The scores of the warp's keys, over its columns. The first k16-steps of all panels form one
    // chain of sums, and the second ones another.
    FS_DEVICE void share_scores(uint32_t block) const {
        const auto keys = own_keys(block);
        float sums[2][kOwnTiles][4];
        zero(sums);
#pragma unroll
        for (int p = 0; p < Kernel::n_panels; ++p)
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int pair = 0; pair < kOwnTiles / 2; ++pair) {
                    uint32_t two_tiles[4];
                    keys.load(two_tiles, kPanelSteps * p + step, pair);
                    mma_m16n8k16<value_t>(sums[step][2 * pair], Q[p][step],
                                          {two_tiles[0], two_tiles[1]});
                    mma_m16n8k16<value_t>(sums[step][2 * pair + 1], Q[p][step],
                                          {two_tiles[2], two_tiles[3]});
                }
#pragma unroll
        for (int n = 0; n < kOwnTiles; ++n) {
            const auto bits = [&](int e) { return __float_as_uint(sums[0][n][e] + sums[1][n][e]); };
            store_shared_16B(share(warp, n), {bits(0), bits(1), bits(2), bits(3)});
        }
    }

    // All scores of a block, from the shares of all warps.
    FS_DEVICE void add_scores() {
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
            const int of_warp = n / kOwnTiles * 2;
            const uint4 left = load_shared_16B(share(of_warp, n % kOwnTiles)),
                        right = load_shared_16B(share(of_warp + 1, n % kOwnTiles));
            S[0][n][0] = __uint_as_float(left.x) + __uint_as_float(right.x);
            S[0][n][1] = __uint_as_float(left.y) + __uint_as_float(right.y);
            S[0][n][2] = __uint_as_float(left.z) + __uint_as_float(right.z);
            S[0][n][3] = __uint_as_float(left.w) + __uint_as_float(right.w);
        }
    }
    // The address of a lane's four scores in a warp's 16x8 tile.
    FS_DEVICE uint32_t share(int of_warp, int n) const {
        return smem + Kernel::shares_offset + 16 * ((of_warp * kOwnTiles + n) * kWarpSize + lane);
    }

    FS_DEVICE void mask(int block) {
        mask_keys<SEMANTICS>(
            S, lane, block * Kernel::B_c, [&](int, int r) { return tile.keys(lanes_row(r)); },
            -INFINITY);
    }
    FS_DEVICE int lanes_row(int r) const { return tile.first_row + lane / 4 + 8 * r; }

    // Calls `function` with the program's arguments and the coordinates of this lane's scores.
    // Queries count from the call's first.
    template <class Function>
    FS_DEVICE void with_program(int block, const Function& function) const {
        function(
            program(), ProgramSequence{tile.batch, tile.q_count, tile.k_count}, lane,
            [&](int, int r) { return tile.token(lanes_row(r)); },
            [&](int, int r) { return tile.head(lanes_row(r)); }, block * Kernel::B_c);
    }
    // The program's arguments. Their scale includes the cache's; the host has already multiplied it
    // in if it is a number.
    FS_DEVICE decltype(auto) program() const {
        if constexpr (Kernel::has_scale && SEMANTICS.program_scores) {
            ProgramArgs scaled = args.program;
            if (args.row_scale.on_device != nullptr)
                scaled.scale = __fmul_rn(scaled.scale, row_scale(args));
            return scaled;
        } else {
            return (args.program);
        }
    }

    // ---- O += P V ----

    FS_DEVICE void add_values(uint32_t block) {
        InRegisters<1, Kernel::B_c / 16> P;
        round_to<value_t>(P, S);
        multiply<value_t, Kernel::B_c / 16>(
            O, P,
            value_operand<Layout, kMmaSyncMlaWarps, value_t, Kernel::cache>(block, lane, warp));
    }

    // ---- the beginning and the end ----

    // The A fragments of the warp's columns. Rows may be heads and tokens with any strides.
    FS_DEVICE void load_Q() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lanes_row(r);
            const bool exists = row < tile.row_end;
            const auto* from = static_cast<const value_t*>(args.q) +
                               tile.element(args.q_strides, exists ? row : tile.first_row) +
                               32 * column_half() + lane % 4 * 2;
#pragma unroll
            for (int p = 0; p < Kernel::n_panels; ++p)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const auto* pair = from + Kernel::panel_columns * p + 8 * i;
                    Q[p][i / 2][r + i % 2 * 2] =
                        exists ? load_global_4B(reinterpret_cast<const int32_t*>(pair)) : 0;
                }
        }
    }

    FS_DEVICE void finish(int part) {
        const bool is_part = tile.is_split();
        float factors[1][2];
        softmax.finalize(factors, is_part ? nullptr : args.sinks,
                         [&](int, int r) { return tile.head(lanes_row(r)); });
        softmax.normalize(O, factors);
        if constexpr (Kernel::has_codes) restore_columns(O, lane);
        if (is_part) {
            store_part(part);
        } else {
            scale_O();
            store_rows();
        }
    }

    FS_DEVICE void scale_O() {
#pragma unroll
        for (int n = 0; n < 2 * Kernel::v_panels; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scale_values(args, O[0][n][e]);
    }

    FS_DEVICE void store_part(int part) const {
        const int64_t row = tile.first_part_row + part * Kernel::B_r + lane / 4;
        float* o = args.parts + row * Kernel::d_v + 16 * warp + lane % 4 * 2;
        float* const lse = args.parts + args.part_rows * Kernel::d_v + row;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (warp == 0 && lane % 4 == 0) lse[8 * r] = softmax.row_sum[0][r];
#pragma unroll
            for (int n = 0; n < 2 * Kernel::v_panels; ++n)
                store_global_8B(o + n / 2 * Kernel::panel_columns + n % 2 * 8,
                                float2{O[0][n][2 * r], O[0][n][2 * r + 1]});
            o += 8 * Kernel::d_v;
        }
    }

    // Pairs of lanes swap halves of two neighbouring 16x8 tiles, so that four lanes write 32 bytes
    // of a row, a whole sector.
    FS_DEVICE void store_rows() const {
        const int odd = lane % 2;
        auto* const output =
            static_cast<uint16_t*>(args.o) + 16 * warp + 8 * odd + lane % 4 / 2 * 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lanes_row(r);
            const bool exists = row < tile.row_end;
            if (warp == 0 && exists && lane % 4 == 0 && args.lse != nullptr)
                *tile.lse(row) = softmax.row_sum[0][r];
            uint16_t* const o = output + tile.element(args.o_strides, row);
#pragma unroll
            for (int p = 0; p < Kernel::v_panels; ++p) {
                const uint32_t left = packed(2 * p, r), right = packed(2 * p + 1, r);
                const uint32_t swapped = __shfl_xor_sync(0xffffffffu, odd ? left : right, 1);
                if (exists)
                    store_global_8B(o + Kernel::panel_columns * p,
                                    odd ? uint2{swapped, right} : uint2{left, swapped});
            }
        }
    }
    FS_DEVICE uint32_t packed(int n, int r) const {
        return pack_16bit<value_t>(O[0][n][2 * r], O[0][n][2 * r + 1]);
    }
};

}  // namespace flashsmith
