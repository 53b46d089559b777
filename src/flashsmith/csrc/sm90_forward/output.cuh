// Stores O from registers: through shared memory and TMA, or directly. The store is drained while
// the next tile runs.
#pragma once

#include "sm90/tma.cuh"
#include "sm90_forward/work_tile.cuh"

namespace flashsmith {

// Stores four 8x8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l /
// 8.
FS_DEVICE void stmatrix_x4(uint32_t smem, const uint32_t (&d)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
                 "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
                 : "memory");
}

// One warp's sixteen rows of O. They pass through the warp's own rows of its Q slot or, if there is
// one, of the warpgroup's O tile.
// They have O's columns from kFirstColumn on.
template <class Kernel, int kFirstColumn = 0>
struct OutputStore {
    using Panel = typename Kernel::Panel;
    using TileInfo = TileInfoOf<Kernel>;
    static constexpr bool kSeparate = Kernel::CFG.separate_O;
    static constexpr int kNoBarrier = 0;
    static constexpr int kTiles = Kernel::O_columns / 8;
    // With d_head 72 and 80, zeros are written to the columns of a separate O tile's last panel
    // that O does not have, because nothing else is stored there.
    static constexpr int kWrittenTiles = kSeparate ? Kernel::V_panels * Panel::kChunks : kTiles;

    const HopperForwardKernelArgs& args;
    int warp, lane;
    // The empty barrier of the Q slot that a store is still reading.
    uint32_t slot_in_use = kNoBarrier;

    // Stores through the warpgroup's `tile`. `slot_empty` is the barrier at which Q's slot is
    // released.
    FS_DEVICE void start(const typename Kernel::O_t& O, uint32_t tile, uint32_t slot_empty,
                         const TileInfo& info, int first_row) {
        if constexpr (kSeparate) {
            if (lane == 0) tma_store_wait_read();
            __syncwarp();
        } else {
            slot_in_use = slot_empty;
        }
        tile += warp * kWarpRows * Panel::kRowBytes;
        write_rows(O, tile);
        tma_store_fence();
        __syncwarp();
        const int row = first_row + warp * kWarpRows;
        if (lane == 0 && row < info.row_end) store_panels(tile, info, row);
    }

    // Stores directly to global memory. Pairs of lanes swap halves of two neighbouring 16x8 tiles,
    // so that four lanes write 32 bytes of a row, a whole sector.
    FS_DEVICE void store_directly(const typename Kernel::O_t& O, const TileInfo& info,
                                  int first_row) const {
        const int lane = lane_index();  // as in write_rows()
        const ForwardKernelArgs& problem = args.problem;
        const int row = first_row + warp * kWarpRows + lane / 4, odd = lane % 2;
        auto* o = static_cast<uint16_t*>(problem.o) + info.batch * problem.o_batch_stride +
                  (info.q_first + token_of<Kernel>(args, row)) * problem.o_seq_stride +
                  head_of<Kernel>(args, info.head, row) * problem.o_head_stride + kFirstColumn +
                  8 * odd + lane % 4 / 2 * 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool exists = row + 8 * r < info.row_end;
#pragma unroll
            for (int n = 0; n < kTiles; n += 2) {
                const uint32_t left = packed(O, n, r), right = packed_or_zero(O, n + 1, r);
                const uint32_t swapped = __shfl_xor_sync(0xffffffffu, odd ? left : right, 1);
                if (exists && (n + 1 < kTiles || !odd) &&
                    (!Kernel::SEMANTICS.uneven || kFirstColumn + 8 * (n + odd) < problem.d))
                    store_global_8B(o + 8 * n, odd ? uint2{swapped, right} : uint2{left, swapped});
            }
            o += eight_rows(row);
        }
    }

    // Stores fp32 without swaps: four lanes already have 32 bytes of a row.
    FS_DEVICE void store_fp32(const typename Kernel::O_t& O, const TileInfo& info,
                              int first_row) const {
        const int lane = lane_index();  // as in write_rows()
        const ForwardKernelArgs& problem = args.problem;
        const int row = first_row + warp * kWarpRows + lane / 4;
        auto* o = static_cast<float*>(problem.o) + info.batch * problem.o_batch_stride +
                  (info.q_first + token_of<Kernel>(args, row)) * problem.o_seq_stride +
                  head_of<Kernel>(args, info.head, row) * problem.o_head_stride + kFirstColumn +
                  lane % 4 * 2;
        store_rows(O, o, eight_rows(row), row, info.row_end);
    }

    // Stores O to the rows of a part.
    FS_DEVICE void store_part(const typename Kernel::O_t& O, const TileInfo& info,
                              int first_row) const {
        const int lane = lane_index();  // as in write_rows()
        const int row = warp * kWarpRows + lane / 4;
        auto* o = args.problem.parts + int64_t{info.part_row + row} * Kernel::d_v + kFirstColumn +
                  lane % 4 * 2;
        store_rows(O, o, 8 * Kernel::d_v, first_row + row, info.row_end);
    }

    // Waits until the last store has been read from shared memory, and frees Q's slot.
    FS_DEVICE void drain() {
        if (kSeparate || slot_in_use == kNoBarrier) return;
        if (lane == 0) {
            tma_store_wait_read();
            mbarrier_arrive(slot_in_use);
        }
        slot_in_use = kNoBarrier;
    }

    // Shared memory must exist until its last store has been read.
    FS_DEVICE void finish() const {
        if (lane == 0) tma_store_wait_read();
    }

  private:
    // The distance in elements from a row of o to the eighth row after it.
    FS_DEVICE int64_t eight_rows(int row) const {
        const ForwardKernelArgs& problem = args.problem;
        if constexpr (!Kernel::packs_gqa) return 8 * problem.o_seq_stride;
        const auto offset = [&](int row) {
            return token_of<Kernel>(args, row) * problem.o_seq_stride +
                   head_of<Kernel>(args, 0, row) * problem.o_head_stride;
        };
        return offset(row + 8) - offset(row);
    }

    // `o` points at this lane's first element in `row`; its other row is `step` elements further.
    FS_DEVICE void store_rows(const typename Kernel::O_t& O, float* o, int64_t step, int row,
                              int row_end) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (row + 8 * r < row_end) {
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
                    if (kFirstColumn + 8 * n < args.problem.d)
                        store_global_8B(o + 8 * n, float2{O[0][n][2 * r], O[0][n][2 * r + 1]});
            }
            o += step;
        }
    }

    // This lane's elements of tile n in its row r, packed to 16 bits.
    FS_DEVICE static uint32_t packed(const typename Kernel::O_t& O, int n, int r) {
        return pack_16bit<typename Kernel::value_t>(O[0][n][2 * r], O[0][n][2 * r + 1]);
    }

    // Like packed(), but 0 for the tile after an odd number of tiles.
    FS_DEVICE static uint32_t packed_or_zero(const typename Kernel::O_t& O, int n, int r) {
        return n < kTiles ? packed(O, n, r) : 0;
    }

    // Two 16x8 accumulator tiles are four 8x8 matrices: lanes 0-15 address the left tile's rows,
    // lanes 16-31 the right tile's.
    FS_DEVICE void write_rows(const typename Kernel::O_t& O, uint32_t tile) const {
        // Reads the lane's index again. From an index that was read earlier, the addresses below
        // would be computed early, too, and occupy registers that the main loop needs.
        const int lane = lane_index();
#pragma unroll
        for (int n = 0; n < kWrittenTiles; n += 2) {
            uint32_t rows[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) rows[i] = packed_or_zero(O, n + i / 2, i % 2);
            const uint32_t panel = n / Panel::kChunks * Kernel::Q_panel_bytes;
            const int chunk = n % Panel::kChunks + lane / 16;
            stmatrix_x4(tile + panel + Panel::offset(lane % 16, chunk), rows);
        }
    }

    FS_DEVICE void store_panels(uint32_t tile, const TileInfo& info, int row) const {
        auto box = box_of_queries<Kernel>(args, info, row);
#pragma unroll
        for (int p = 0; p < Kernel::V_panels; ++p) {
            box.column = p * Panel::kColumns;
            tma_store(&args.o, box, tile + p * Kernel::Q_panel_bytes);
        }
        tma_store_commit();
    }
};

}  // namespace flashsmith
