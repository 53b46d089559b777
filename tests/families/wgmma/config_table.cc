// The C++ side's answers for many wgmma configs at once, for test_cpp_parity.py to compare with
// Python's. fields.inc is generated from Python's fields: it defines kFields, config_from(ints)
// and has_all_fields.

#include "sm90_forward/config.cuh"

namespace {

using Config = flashsmith::WgmmaForwardKernelConfig;
using flashsmith::DType;

#include "fields.inc"

static_assert(has_all_fields(Config{}));

}  // namespace

extern "C" {

void tabulate_smem_bytes(const int* configs, int count, long long* out) {
    for (int i = 0; i < count; ++i) out[i] = config_from(configs + i * kFields).smem_bytes();
}

void tabulate_ctas(const int* configs, int count, int max_smem_bytes, int registers, int* out) {
    for (int i = 0; i < count; ++i)
        out[i] = config_from(configs + i * kFields).num_ctas_per_sm(max_smem_bytes, registers);
}

// -1, 0 or 1: how std::map orders two configs.
int compare(const int* left, const int* right) {
    const auto order = config_from(left) <=> config_from(right);
    return order < 0 ? -1 : (order > 0 ? 1 : 0);
}
}
