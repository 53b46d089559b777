// The C++ side's answers for many configs at once, for test_cpp_parity.py to compare with Python's.

#include "mma_sync/flash_attention.cuh"

namespace {

using flashsmith::DType;
using flashsmith::FlashForwardKernelConfig;

constexpr int kFields = 23;

FlashForwardKernelConfig config_from(const int* v) {
    return {.dtype = static_cast<DType>(v[0]),
            .d_head = v[1],
            .B_r = v[2],
            .B_c = v[3],
            .n_warps = v[4],
            .async_copy = v[5] != 0,
            .eager_load_blocks = v[6] != 0,
            .swizzled = v[7] != 0,
            .Q_mma_load_K_tiles = v[8],
            .K_mma_load_K_tiles = v[9],
            .V_mma_load_K_tiles = v[10],
            .mma_double_buffer_loads = v[11] != 0,
            .optimized_softmax = v[12] != 0,
            .kv_stages = v[13],
            .lazy_rescale = v[14] != 0,
            .ping_pong = v[15] != 0,
            .min_ctas_per_sm = v[16],
            .trim_masks = v[17] != 0,
            .l2_group_mib = v[18],
            .split_keys = v[19],
            .pack_gqa = v[20] != 0,
            .canonical = v[21],
            .d_v = v[22]};
}

}  // namespace

extern "C" {

void tabulate_smem_bytes(const int* configs, int count, int elem_size, int* out) {
    for (int i = 0; i < count; ++i) {
        out[i] = config_from(configs + i * kFields).smem_bytes(elem_size);
    }
}

void tabulate_ctas(const int* configs, int count, int max_smem_bytes, int registers, int* out) {
    for (int i = 0; i < count; ++i) {
        const FlashForwardKernelConfig cfg = config_from(configs + i * kFields);
        out[i] = cfg.num_ctas_per_sm(max_smem_bytes, registers);
    }
}

// -1, 0 or 1: how std::map orders two configs.
int compare(const int* left, const int* right) {
    const auto order = config_from(left) <=> config_from(right);
    return order < 0 ? -1 : (order > 0 ? 1 : 0);
}
}
