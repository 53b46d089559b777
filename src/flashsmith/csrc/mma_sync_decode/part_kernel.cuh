// The kernel that reads the cache. A CTA works on one run at a time. A run is a tile of rows
// together with consecutive parts of the keys of the tile's sequence. The CTA computes the tile's
// state over these keys, and then takes its next run.
#pragma once

#include "mma_sync_decode/canonical_run.cuh"
#include "mma_sync_decode/chunk_cluster.cuh"
#include "mma_sync_decode/decode_run.cuh"

namespace flashsmith {

template <class Kernel, bool kPaged>
using RunOf =
    std::conditional_t<Kernel::canonical, CanonicalRun<Kernel, kPaged>, DecodeRun<Kernel, kPaged>>;

// Prefetches keys that this CTA, or all CTAs together, will read.
template <class Kernel, bool kPaged>
FS_DEVICE void prefetch_keys(const DecodeKernelArgs& args) {
    if constexpr (Kernel::SEMANTICS.program_masks) return;  // may hide these keys
    if constexpr (!kPaged && !Kernel::takes_chunks && !Kernel::SEMANTICS.packed &&
                  !Kernel::SEMANTICS.hides_earlier && Kernel::has_whole_runs)
        if ((args.flags & kPrefetchesRuns) != 0) prefetch_run<Kernel>(args);
    if constexpr (Kernel::uses_pdl && !Kernel::SEMANTICS.hides_earlier)
        if (args.log2_prefetched_keys > 0) prefetch_first_keys<Kernel, kPaged>(args);
}

template <class Kernel, bool kPaged>
FS_DEVICE void compute_parts(const DecodeKernelArgs& args, uint32_t smem) {
    // A mask may read data that the preceding launch writes, and the warps vote on its result, so
    // no warp may guess.
    constexpr bool kGuesses =
        Kernel::uses_pdl && !Kernel::SEMANTICS.packed && !Kernel::SEMANTICS.program_masks;
    // If nothing is appended, the preceding launch may still be writing the lengths. Until it is
    // over, the values in memory are a guess, which is mostly right: lengths change once for all
    // layers of a model.
    Lengths lengths;
    if constexpr (kGuesses) lengths.are_guessed = (args.flags & kGuessesLengths) != 0;
    const int32_t* const own_length = args.cache_lens + min(lane_index(), args.batch - 1);
    if (lengths.are_guessed)
        lengths.guess = load_relaxed(own_length);
    else
        prefetch_lengths<Kernel>(args);
    prefetch_keys<Kernel, kPaged>(args);
    const bool in_cluster =
        Kernel::has_clusters && !Kernel::takes_chunks && args.cluster_levels > 0;
    if constexpr (Kernel::has_clusters && !Kernel::takes_chunks)
        if (in_cluster) ClusterMerge<Kernel>::begin(args, smem);
    if (!lengths.are_guessed && args.new_k == nullptr) wait_for_launch_before();
    DecodeItem item{};
    WorkCursor cursor(Kernel::takes_chunks ? 0 : share_of_cta<Kernel>(args, lengths),
                      block_index());
    bool found = find_item<Kernel>(args, cursor, item, lengths);
    int length = 0;
    const auto begin_launch = [&] {
        // The order matters: the merge reads lengths before it waits.
        wait_for_launch_before();
        if (!Kernel::has_whole_runs || (args.flags & kHoldsNextLaunch) == 0) allow_next_launch();
        // This load of the true length overlaps the copies of the guessed run's first keys.
        if (lengths.are_guessed) length = *own_length;
    };
    // The launch begins with the first run: all work that does not need the preceding launch is
    // done before that.
    bool begins = !Kernel::takes_chunks && (found || lengths.are_guessed);
    if (!begins) begin_launch();
    if constexpr (Kernel::takes_chunks) {
        // Each search starts at the first sequence, because no register is left to keep the
        // position of the last one.
        for (uint32_t round = 1; found; ++round) {
            const DecodeRun<Kernel, kPaged> run(args, item, smem);
            auto copies = run.first_copies(false);
            run.start(copies);
            run.run(copies, cursor, 0);
            cursor = WorkCursor(0, block_index() + round * gridDim.x);
            found = find_item<Kernel>(args, cursor, item);
        }
        return;
    }
    // Two addresses alternate, because threads may still read one when the next search stores its
    // result.
    uint32_t address = smem + Kernel::search_offset;
    while (found || lengths.are_guessed) {
        const RunOf<Kernel, kPaged> run(args, item, smem);
        const bool has_run = found && (!Kernel::has_clusters || item.first_part < item.end_part);
        auto copies = run.first_copies(lengths.are_guessed);
        if (begins) {
            copies.materialize();
            begin_launch();
            if constexpr (kPaged)
                if (lengths.are_guessed) copies.pages.read_again(copies.first_step < copies.steps);
            begins = false;
        }
        if (has_run) run.start(copies);
        if (lengths.are_guessed) {
            lengths.are_guessed = false;
            // Each warp decides separately, because another warp may have guessed differently. A
            // thread's new copies overwrite only copies that it has waited for.
            bool is_right = length == lengths.guess;
            if constexpr (kPaged) is_right &= copies.pages.are_as_guessed();
            if (!__all_sync(kWholeWarp, is_right)) {
                cp_async_wait<0>();
                cursor = WorkCursor(share_of_cta<Kernel>(args), block_index());
                found = find_item<Kernel>(args, cursor, item);
                continue;
            }
            if (!found) return;
        }
        if constexpr (Kernel::has_clusters)
            if (in_cluster) run.begin_in_cluster();
        if (has_run) run.run(copies, cursor, address);
        if constexpr (Kernel::has_clusters) {
            if (in_cluster) {
                run.merge_in_cluster();
                return;
            }
        }
        cursor = WorkCursor(address);
        address ^= WorkCursor::kBytes;
        found = find_item<Kernel>(args, cursor, item);
    }
}

template <class Kernel, bool kPaged>
FS_DEVICE void compute_rows(const DecodeKernelArgs& args, uint32_t smem) {
    if constexpr (Kernel::chunk_cluster > 0)
        compute_chunks_in_cluster<Kernel, kPaged>(args, smem);
    else
        compute_parts<Kernel, kPaged>(args, smem);
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads, Kernel::min_ctas)
    decode_kernel(const typename Kernel::Args args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    compute_rows<Kernel, false>(args, shared_address(shared_memory));
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads, Kernel::min_paged_ctas)
    decode_paged_kernel(const typename Kernel::Args args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    compute_rows<Kernel, true>(args, shared_address(shared_memory));
}

}  // namespace flashsmith
