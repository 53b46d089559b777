// Tensor maps: what TMA is told of a tensor. A plan specifies them, a launch encodes them for the
// addresses it has. Plain C++20 without CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "common/forward_args.cuh"

namespace flashsmith {

// Where the tensors of one call are; null for what is not given or not wanted.
struct Addresses {
    const void *q, *k, *v;
    void* o;
    float *lse, *row_max;  // (batch, heads_q, seq_q), packed (heads_q, total_q)
    const float* sinks;    // (heads_q)
    const int32_t *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1); null unless packed
};

enum class Operand { q, k, v, o };

const void* address_of(Operand operand, const Addresses& at);

// How a tensor map is to be encoded, and where in the arguments it belongs. The launcher encodes it
// with the driver, the emulator reads it as it stands. Boxes take every element; what is outside of
// the tensor is zero.
struct TensorMapSpec {
    size_t argument_offset;  // bytes from the start of the kernel's arguments
    Operand operand;
    int element_type;  // a DType
    std::vector<uint64_t> sizes;
    std::vector<uint64_t> strides_bytes;  // of dimensions 1 and up
    std::vector<uint32_t> box;
    int swizzle_bytes;

    uintptr_t data(const Addresses& at) const {
        const void* operand_at = address_of(operand, at);
        // K and V without rows may be nowhere. Nobody looks there, but a map must point somewhere.
        if (operand_at == nullptr) operand_at = at.q;
        return reinterpret_cast<uintptr_t>(operand_at);
    }
};

// The tensor maps of one plan, encoded once for every address met. Threads may share it.
class EncodedTensorMaps {
  public:
    explicit EncodedTensorMaps(const std::vector<TensorMapSpec>& specs);

    // Writes the maps into a kernel's arguments. Throws std::runtime_error with the driver's words.
    void write(const Addresses& at, uint8_t* arguments);

  private:
    struct Entry {
        TensorMapSpec spec;
        std::unordered_map<uintptr_t, TensorMap> encoded;
    };
    static const TensorMap& find(Entry& entry, uintptr_t data);

    std::mutex mutex_;
    std::vector<Entry> entries_;
};

}  // namespace flashsmith
