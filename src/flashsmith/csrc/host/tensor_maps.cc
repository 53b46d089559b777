// Encodes tensor maps with the driver.
#include "host/tensor_maps.h"

#include <cuda.h>

#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>

#include "host/driver_functions.h"

namespace flashsmith {
namespace {

// The number of addresses that are cached per map: more than calls use alternately, and only tens
// of megabytes even with the most prepared calls. When the cache is full, it is emptied.
constexpr size_t kMostEncoded = 64;

decltype(&cuTensorMapEncodeTiled) encode_function() {
    static const auto function = [] {
        void* found = driver_function("cuTensorMapEncodeTiled", 12000);
        if (found == nullptr)
            throw std::runtime_error(
                "cuTensorMapEncodeTiled: the driver does not have it; kernels with TMA need a "
                "driver for CUDA 12 or newer");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    }();
    return function;
}

std::string name_of(CUresult status) {
    const auto get_name =
        reinterpret_cast<decltype(&cuGetErrorName)>(driver_function("cuGetErrorName", 6000));
    const char* name = nullptr;
    if (get_name != nullptr && get_name(status, &name) == CUDA_SUCCESS && name != nullptr)
        return name;
    return "error " + std::to_string(status);
}

template <typename Extents>
std::string joined(const Extents& extents) {
    std::string text;
    for (const auto extent : extents) text += (text.empty() ? "" : " x ") + std::to_string(extent);
    return text;
}

// Describes a tensor map that the driver has refused, in terms of the driver's rules.
std::string description(const TensorMapSpec& spec, uintptr_t data) {
    std::ostringstream text;
    text << spec.name << " at 0x" << std::hex << data << std::dec << ", " << joined(spec.sizes)
         << " elements with strides of " << joined(spec.strides_bytes) << " bytes, box "
         << joined(spec.box) << ", swizzle " << spec.swizzle_bytes << " bytes";
    return text.str();
}

CUtensorMapSwizzle swizzle_of(int bytes) {
    switch (bytes) {
        case 32:
            return CU_TENSOR_MAP_SWIZZLE_32B;
        case 64:
            return CU_TENSOR_MAP_SWIZZLE_64B;
        case 128:
            return CU_TENSOR_MAP_SWIZZLE_128B;
        default:
            return CU_TENSOR_MAP_SWIZZLE_NONE;
    }
}

TensorMap encode(const TensorMapSpec& spec, uintptr_t data) {
    const auto type = static_cast<DType>(spec.element_type) == DType::FP16
                          ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                          : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const std::vector<uint32_t> every(spec.sizes.size(), 1);
    alignas(64) CUtensorMap encoded;
    const CUresult status = encode_function()(
        &encoded, type, static_cast<uint32_t>(spec.sizes.size()), reinterpret_cast<void*>(data),
        spec.sizes.data(), spec.strides_bytes.data(), spec.box.data(), every.data(),
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(spec.swizzle_bytes),
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
        throw std::runtime_error("cuTensorMapEncodeTiled: " + name_of(status) + ": " +
                                 description(spec, data));
    TensorMap map;
    static_assert(sizeof map == sizeof encoded);
    std::memcpy(&map, &encoded, sizeof map);
    return map;
}

}  // namespace

EncodedTensorMaps::EncodedTensorMaps(const std::vector<TensorMapSpec>& specs) {
    for (const TensorMapSpec& spec : specs) entries_.push_back({spec, {}});
}

const TensorMap& EncodedTensorMaps::find(Entry& entry, uintptr_t data) {
    const auto found = entry.encoded.find(data);
    if (found != entry.encoded.end()) return found->second;
    const TensorMap map = encode(entry.spec, data);
    if (entry.encoded.size() >= kMostEncoded) entry.encoded.clear();
    return entry.encoded.emplace(data, map).first->second;
}

void EncodedTensorMaps::write(const Buffers& buffers, uint8_t* arguments) {
    if (entries_.empty()) return;
    const std::lock_guard lock(mutex_);
    for (Entry& entry : entries_) {
        const TensorMap& map = find(entry, buffers.address(entry.spec.place));
        std::memcpy(arguments + entry.spec.argument_offset, &map, sizeof map);
    }
}

}  // namespace flashsmith
