// Tensor maps: how TMA accesses a tensor. A plan describes them, and a launch encodes them for its
// addresses. Plain C++20 without CUDA headers.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "common/types.cuh"
#include "host/plan.h"

namespace flashsmith {

// The tensor maps of one launch, which are encoded once per address. Several threads may use them.
class EncodedTensorMaps {
  public:
    explicit EncodedTensorMaps(const std::vector<TensorMapSpec>& specs);

    // Writes the maps to the arguments of a kernel. Throws std::runtime_error with the message of
    // the driver.
    void write(const Buffers& buffers, uint8_t* arguments);

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
