// The data of a run that the end of each part needs. They are kept in shared memory, because the
// steps leave no registers for them.
#pragma once

#include "mma_sync_decode/split.cuh"

namespace flashsmith {

struct RunInfo {
    int batch, head_k, tile, first_query;
    int parts, first_part, end_part, run_levels;
    int rows;  // of the K/V head

    FS_DEVICE explicit RunInfo(uint32_t address) {
        const uint4 x = load_shared_16B(address), y = load_shared_16B(address + 16);
        batch = x.x, head_k = x.y, tile = x.z, first_query = x.w;
        parts = y.x, first_part = y.y, end_part = y.z, run_levels = y.w;
        rows = load_shared_16B(address + 32).x;
    }
    FS_DEVICE static void save(uint32_t address, const DecodeItem& item, int heads_per_group) {
        const DecodeSequence& s = item.sequence;
        const auto pack = [](int a, int b, int c, int d) {
            return uint4{uint32_t(a), uint32_t(b), uint32_t(c), uint32_t(d)};
        };
        store_shared_16B(address, pack(item.batch, item.head_k, item.tile, s.first_query));
        store_shared_16B(address + 16, pack(s.parts, item.first_part, item.end_part, s.run_levels));
        store_shared_16B(address + 32, pack(s.queries * heads_per_group, 0, 0, 0));
    }

    // The address of the byte in which a warp stores which stage holds its sums, and the address of
    // all warps' bytes.
    FS_DEVICE static uint32_t stage_address(uint32_t address, int warp) {
        return address + 36 + warp;
    }
    FS_DEVICE static uint2 stages(uint32_t address) {
        const uint4 its = load_shared_16B(address + 32);
        return {its.y, its.z};
    }

    // The fields that are needed at the end of any part, even if it is not a run's last.
    FS_DEVICE static uint4 of_parts(uint32_t address) { return load_shared_16B(address + 16); }

    FS_DEVICE bool has_all_parts() const { return first_part == 0 && end_part == parts; }
    FS_DEVICE int runs() const { return (parts + (1 << run_levels) - 1) >> run_levels; }
};

}  // namespace flashsmith
