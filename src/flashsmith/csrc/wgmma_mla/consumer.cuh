// The two consumer warpgroups of a CTA. Both have the tile's 64 rows, and each has half of the
// columns of O, which one warpgroup's registers could not hold. Blocks of keys alternate between
// them: a warpgroup computes the scores and probabilities of its own blocks, and multiplies the
// probabilities of all blocks, in order, with its half of V. The first warpgroup has the first
// block of each pair.
//
// One buffer is enough for P: a warpgroup overwrites the other's P only after its own product has
// read it, and both wait for the other's P in between.
#pragma once

#include "sm90_forward/output.cuh"
#include "sm90_forward/row_softmax.cuh"
#include "wgmma_mla/part_range.cuh"
#include "wgmma_mla/producer.cuh"

namespace flashsmith {

// Numbered barriers; 0 belongs to __syncthreads.
constexpr int kBothBarrier = 1, kFirstPBarrier = 2, kSecondPBarrier = 3;

template <class Kernel, int kHalf>
struct MlaConsumer {
    static_assert(Kernel::valid_config());
    static constexpr WgmmaMlaKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr int kOther = 1 - kHalf;
    static constexpr int kBoth = kMlaConsumers * kWarpgroupThreads;
    using Panel = typename Kernel::Panel;
    using value_t = typename Kernel::value_t;
    using Softmax = RowSoftmax<(CFG.rescale_threshold > 0), 0, 2>;

    const MlaTile<Kernel>& tile;
    const MlaKernelArgs& args;
    const uint32_t smem;
    const int warp, lane;
    BlockRange blocks;  // of the part
    int blocks_before;  // of the CTA's parts before it
    Softmax softmax;
    typename Kernel::S_t S;
    typename Kernel::P_t P;
    typename Kernel::O_t O;
    bool rescales_O;
    float O_factors[2];  // by row

    FS_DEVICE MlaConsumer(const MlaTile<Kernel>& tile, uint32_t smem)
        : tile(tile),
          args(tile.args),
          smem(smem),
          warp(__shfl_sync(0xffffffffu, thread_index() / kWarpSize % kWarpsPerWarpgroup, 0)),
          lane(lane_index()),
          softmax(tile.args.scale_log2) {}

    // ---- the algorithm ----

    FS_DEVICE void run(const PartRange& parts) {
        load_Q();
        blocks_before = 0;
        if constexpr (CFG.run_keys == 0) {
            compute(parts.begin);
        } else {
#pragma unroll 1
            for (int part = parts.begin; part < parts.end; ++part) {
                softmax = Softmax(args.scale_log2);
                compute(part);
                blocks_before += blocks.end - blocks.begin;
            }
        }
    }

    // A part before the last one has pairs of blocks only, so that blocks alternate between the
    // warpgroups throughout.
    FS_DEVICE void compute(int part) {
        blocks = tile.of_part(part);
        zero(O);
        const int count = blocks_before + blocks.end - blocks.begin;
        if constexpr (CFG.panels_ahead > 0) {
            in_turn(count);
        } else {
#pragma unroll 1
            for (int i = blocks_before; i < count; i += 2) {
                const bool is_pair = i + 1 < count;
                if constexpr (kHalf == 0)
                    own_block_first(i, is_pair);
                else
                    own_block_second(i, is_pair);
            }
        }
        finish(part);
    }

    // The order of work with panels_ahead, in both warpgroups: the other's block is multiplied, and
    // its stage becomes free, before all of the own block has arrived.
    FS_DEVICE void in_turn(int count) {
        int i = blocks_before + kHalf;
#pragma unroll 1
        for (; i < count; i += 2) {
            start_scores<0, CFG.panels_ahead>(i);
            if (i > blocks_before) add_other_block(i - 1);
            start_scores<CFG.panels_ahead, Kernel::n_panels>(i);
            finish_scores(i);
            compute_probabilities();
            add_own_block<kHalf == 0 ? kFirstPBarrier : kSecondPBarrier>(i);
        }
        // A part without keys has no block.
        if (i == count && i > blocks_before) add_other_block(i - 1);
    }
    template <int kBarrier>
    FS_DEVICE void add_own_block(int i) {
        publish<kBarrier>();
        if (rescales_O) softmax.rescale(O, O_factors);
        start_own_PV_gemm(i);
        finish_PV_gemm(i);
    }
    FS_DEVICE void add_other_block(int i) {
        named_barrier_wait<kHalf == 0 ? kSecondPBarrier : kFirstPBarrier, kBoth>();
        receive_maxima();
        start_other_PV_gemm(i);
        finish_PV_gemm(i);
        pin(S);  // wgmma that came before the product have written it
    }

    // The order of work in the first warpgroup. Meanwhile the second warpgroup computes its scores.
    FS_DEVICE void own_block_first(int i, bool is_pair) {
        compute_scores(i);
        compute_probabilities();
        publish<kFirstPBarrier>();
        if (rescales_O) softmax.rescale(O, O_factors);
        start_own_PV_gemm(i);
        finish_PV_gemm(i);
        if (!is_pair) return;
        named_barrier_wait<kSecondPBarrier, kBoth>();
        receive_maxima();
        start_other_PV_gemm(i + 1);
        finish_PV_gemm(i + 1);
    }

    // The order of work in the second warpgroup, whose softmax overlaps the product of the first
    // block.
    FS_DEVICE void own_block_second(int i, bool is_pair) {
        if (is_pair) compute_scores(i + 1);
        named_barrier_wait<kFirstPBarrier, kBoth>();
        receive_maxima();
        start_other_PV_gemm(i);
        if (!is_pair) {
            finish_PV_gemm(i);
            return;
        }
        compute_probabilities();
        finish_PV_gemm(i);
        publish<kSecondPBarrier>();
        if (rescales_O) softmax.rescale(O, O_factors);
        start_own_PV_gemm(i + 1);
        finish_PV_gemm(i + 1);
    }

    // ---- GEMMs ----

    // S = Q K^T, section by section as K arrives.
    FS_DEVICE void compute_scores(int i) {
        start_scores<0, Kernel::n_panels>(i);
        finish_scores(i);
    }
    // Panels kBegin to kEnd, in the order in which they arrive.
    template <int kBegin, int kEnd>
    FS_DEVICE void start_scores(int i) {
        constexpr int kTails = Kernel::section_panels(kTail), kHalves = Kernel::half_panels;
        if constexpr (kBegin == 0) pin(S);
        add_section<kTail, clamped(kBegin, kTails), clamped(kEnd, kTails)>(i);
        add_section<0, clamped(kBegin - kTails, kHalves), clamped(kEnd - kTails, kHalves)>(i);
        add_section<1, clamped(kBegin - kTails - kHalves, kHalves),
                    clamped(kEnd - kTails - kHalves, kHalves)>(i);
    }
    FS_DEVICE static constexpr int clamped(int panel, int panels) {
        return panel < 0 ? 0 : panel < panels ? panel : panels;
    }
    FS_DEVICE void finish_scores(int i) {
        wgmma_commit();
        wgmma_wait<0>(S);
        release(i, kTail);
        mask(blocks.begin + i - blocks_before);
    }
    template <int kSection, int kBegin, int kEnd>
    FS_DEVICE void add_section(int i) {
        if constexpr (kBegin < kEnd) {
            constexpr uint32_t kFirst = Kernel::first_panel(kSection) * Kernel::panel_bytes;
            constexpr int kSteps = Panel::kStepsPerPanel;
            wait_for_panel(i, kSection, kBegin);
            wgmma_fence();  // without this, ptxas would add a fence after the loop
            const uint64_t q = Panel::descriptor(smem + Kernel::Q_offset + kFirst),
                           k = Panel::descriptor(block_tile(i) + kFirst);
#pragma unroll
            for (int step = kBegin * kSteps; step < kEnd * kSteps; ++step) {
                if (step > kBegin * kSteps &&
                    step % (Kernel::joint_panels(kSection) * kSteps) == 0) {
                    wait_for_panel(i, kSection, step / kSteps);
                    wgmma_fence();
                }
                Kernel::GEMM_QK::run(S, q + Panel::template column_step<kMlaRows>(step),
                                     k + Panel::template column_step<kMlaKeys>(step),
                                     kSection != kTail || step > 0);
            }
        }
    }

    // O += P V, where P is in registers or in shared memory.
    FS_DEVICE void start_own_PV_gemm(int i) {
        const uint64_t v = value_descriptor(i);
        wgmma_fence(O, P);
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step)
            Kernel::GEMM_PV::run(O, P[step], v + Panel::row_step(step), true);
        wgmma_commit();
    }
    FS_DEVICE void start_other_PV_gemm(int i) {
        // The other has waited for all panels of its block before it wrote P.
        if constexpr (!CFG.panel_waits) wait_for_panel(i, kHalf, 0);
        const uint64_t v = value_descriptor(i), p = Panel::descriptor(smem + Kernel::P_offset);
        wgmma_fence(O);
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step)
            Kernel::GEMM_PV::run(O, p + Panel::template column_step<kMlaRows>(step),
                                 v + Panel::row_step(step), true);
        wgmma_commit();
    }
    // This is the last read of a half of V.
    FS_DEVICE void finish_PV_gemm(int i) {
        wgmma_wait<0>(O);
        release(i, kHalf);
    }

    // ---- between the GEMMs ----

    FS_DEVICE void mask(int block) {
        if (!blocks.needs_mask(block)) return;
        const int first_row = tile.first_row + warp * kWarpRows + lane / 4;
        mask_keys<SEMANTICS>(
            S, lane, block * kMlaKeys, [&](int, int r) { return tile.keys(first_row + 8 * r); },
            -INFINITY);
    }

    FS_DEVICE void compute_probabilities() {
        rescales_O = softmax.template update_max<false>(S, O_factors,
                                                        static_cast<float>(CFG.rescale_threshold));
        softmax.template add<false>(softmax.exponentiate(S));
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step)
            pack_fragment<value_t>(P[step], S[0][2 * step], S[0][2 * step + 1]);
    }

    // Passes P and the rows' maxima to the other warpgroup.
    template <int kBarrier>
    FS_DEVICE void publish() {
        const uint32_t rows = smem + Kernel::P_offset + warp * kWarpRows * Panel::kRowBytes;
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step)
            stmatrix_x4(rows + Panel::offset(lane % 16, 2 * step + lane / 16), P[step]);
        if (lane % 4 == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                store_shared_4B(maximum(kHalf, r), __float_as_uint(softmax.row_max[0][r]));
        }
        tma_store_fence();  // wgmma reads P through the same proxy
        named_barrier_arrive<kBarrier, kBoth>();
    }
    FS_DEVICE void receive_maxima() {
        bool any_moved = false;
        float factors[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float& known = softmax.row_max[0][r];
            const float received = load_shared_float(maximum(kOther, r));
            any_moved |= received != known;
            factors[r] = exp2_approx((known - received) * args.scale_log2);
            softmax.row_sum[0][r] *= factors[r];
            known = received;
        }
        if (any_lane(any_moved)) softmax.rescale(O, factors);
    }

    // ---- the end ----

    FS_DEVICE void finish(int part) {
        add_sums();
        const int first_row = tile.first_row + warp * kWarpRows + lane / 4;
        const bool is_part = tile.is_split();
        float factors[1][2];
        softmax.finalize(factors, is_part ? nullptr : args.sinks,
                         [&](int, int r) { return tile.head(first_row + 8 * r); });
        softmax.normalize(O, factors);
        if (is_part)
            store_part(part);
        else
            store_rows(first_row);
    }

    // Adds the sums lane by lane, in the same order in both warpgroups.
    FS_DEVICE void add_sums() {
        const auto of = [&](int half) {
            return smem + Kernel::sums_offset +
                   8 * (half * kWarpgroupThreads + warp * kWarpSize + lane);
        };
        store_shared_8B(of(kHalf), {__float_as_uint(softmax.row_sum[0][0]),
                                    __float_as_uint(softmax.row_sum[0][1])});
        named_barrier_wait<kBothBarrier, kBoth>();
        const float2 first = load_shared_float2(of(0)), second = load_shared_float2(of(1));
        softmax.row_sum[0][0] = first.x + second.x;
        softmax.row_sum[0][1] = first.y + second.y;
    }

    FS_DEVICE void store_part(int part) const {
        const int in_tile = warp * kWarpRows + lane / 4;
        const int64_t row = tile.first_part_row + part * kMlaRows + in_tile;
        float* o = args.parts + row * Kernel::d_v + kHalf * Kernel::half + lane % 4 * 2;
        float* const lse = args.parts + args.part_rows * Kernel::d_v + row;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (tile.first_row + in_tile + 8 * r >= tile.row_end) return;
            if (kHalf == 0 && lane % 4 == 0) lse[8 * r] = softmax.row_sum[0][r];
#pragma unroll
            for (int n = 0; n < Kernel::half / 8; ++n)
                store_global_8B(o + 8 * n, float2{O[0][n][2 * r], O[0][n][2 * r + 1]});
            o += 8 * Kernel::d_v;
        }
    }

    // Pairs of lanes swap halves of two neighbouring 16x8 tiles, so that four lanes write 32 bytes
    // of a row, a whole sector.
    FS_DEVICE void store_rows(int first_row) const {
        const int odd = lane % 2;
        auto* const output =
            static_cast<uint16_t*>(args.o) + kHalf * Kernel::half + 8 * odd + lane % 4 / 2 * 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 8 * r;
            const bool exists = row < tile.row_end;
            if (kHalf == 0 && exists && lane % 4 == 0 && args.lse != nullptr)
                *tile.lse(row) = softmax.row_sum[0][r];
            uint16_t* const o = output + tile.element(args.o_strides, row);
#pragma unroll
            for (int n = 0; n < Kernel::half / 8; n += 2) {
                const uint32_t left = packed(n, r), right = packed(n + 1, r);
                const uint32_t swapped = __shfl_xor_sync(0xffffffffu, odd ? left : right, 1);
                if (exists)
                    store_global_8B(o + 8 * n, odd ? uint2{swapped, right} : uint2{left, swapped});
            }
        }
    }
    FS_DEVICE uint32_t packed(int n, int r) const {
        return pack_16bit<value_t>(O[0][n][2 * r], O[0][n][2 * r + 1]);
    }

    // ---- shared memory ----

    // Both warpgroups copy the rows of Q, since these may be heads and tokens with any strides.
    FS_DEVICE void load_Q() const {
        constexpr int kThreadsPerRow = Panel::kChunks, kRows = kBoth / kThreadsPerRow;
        const int thread = kHalf * kWarpgroupThreads + warp * kWarpSize + lane;
        const int chunk = thread % kThreadsPerRow;
#pragma unroll
        for (int in_tile = thread / kThreadsPerRow, i = 0; i < kMlaRows / kRows;
             ++i, in_tile += kRows) {
            const int row = tile.first_row + in_tile;
            const bool exists = row < tile.row_end;
            const auto* from = static_cast<const value_t*>(args.q) +
                               tile.element(args.q_strides, exists ? row : tile.first_row) +
                               chunk * 8;
            const uint32_t to = smem + Kernel::Q_offset + Panel::offset(in_tile, chunk);
#pragma unroll
            for (int p = 0; p < Kernel::n_panels; ++p)
                cp_async_16B_or_zeros(to + p * Kernel::panel_bytes, from + p * Panel::kColumns,
                                      exists);
        }
        cp_async_commit();
        cp_async_wait<0>();
        tma_store_fence();  // wgmma reads Q through the same proxy
        named_barrier_wait<kBothBarrier, kBoth>();
    }

    FS_DEVICE uint32_t block_tile(int i) const {
        return smem + Kernel::K_offset + i % kMlaStages * Kernel::tile_bytes;
    }
    // The descriptor of the warpgroup's columns of a block, which are read as V.
    FS_DEVICE uint64_t value_descriptor(int i) const {
        return Panel::descriptor(block_tile(i) + Kernel::first_panel(kHalf) * Kernel::panel_bytes,
                                 Kernel::panel_bytes);
    }
    FS_DEVICE uint32_t maximum(int half, int r) const {
        return smem + Kernel::maxima_offset +
               4 * (half * kMlaRows + warp * kWarpRows + lane / 4 + 8 * r);
    }
    FS_DEVICE void wait_for_panel(int i, int section, int panel) const {
        const int index = barrier_index<Kernel>(i % kMlaStages, section, panel);
        mbarrier_wait(section_barriers<Kernel>(smem).full(index), phase_of(i));
    }
    FS_DEVICE void release(int i, int section) const {
        const int index = barrier_index<Kernel>(i % kMlaStages, section);
        if (lane == 0) mbarrier_arrive(section_barriers<Kernel>(smem).empty(index));
    }
};

}  // namespace flashsmith
