// Makes tensor maps for the tensors that kernels copy by TMA. Plain C++20 without CUDA headers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "common/constants.cuh"
#include "common/types.cuh"
#include "host/forward_problem.h"

namespace flashsmith {

inline constexpr int64_t kStrideUnit = 16;
inline constexpr int64_t kStrideLimit = int64_t{1} << 40;
inline constexpr uint64_t kWrap = uint64_t{1} << 34;

// A tensor that TMA copies in boxes with `box_rows` rows of one head. If the rows are the heads of
// a group, a box has `box_heads` heads of box_rows / box_heads tokens.
struct CopiedTensor {
    const char* name;
    size_t index;  // index among the operation's tensors
    size_t argument_offset;
    Strides strides;
    int64_t rows, heads, total;  // rows of a sequence; packed: total rows of all sequences
    int box_rows;
    int box_heads = 0;
    bool is_single_row = false;
    int64_t columns = 0;  // 0: as many columns as q

    bool is_empty(const ForwardProblem& p, bool packed) const {
        return packed ? total == 0 : rows == 0 || p.batch == 0;
    }
};

// TMA rejects a stride of 0, and ignores the stride of a dimension of size 1.
inline uint64_t stride_bytes(const CopiedTensor& tensor, const char* what, int64_t elements,
                             int64_t size) {
    const int64_t bytes = elements * kElementBytes;
    if (size <= 1 || tensor.is_single_row) return kStrideUnit;
    require(bytes > 0 && bytes % kStrideUnit == 0 && bytes < kStrideLimit,
            std::string(tensor.name) + ": its " + what + " stride is " + std::to_string(elements) +
                " elements; TMA takes positive multiples of 8 below 2^39: make it contiguous, or "
                "take a config of the mma.sync family");
    return bytes;
}

// A tensor without rows has no address and may have any strides; its map is never used. The map
// therefore describes a single row at the address of q instead.
inline CopiedTensor single_row(CopiedTensor tensor, size_t q) {
    tensor.index = q;
    tensor.rows = tensor.heads = tensor.total = 1;
    tensor.is_single_row = true;
    return tensor;
}

// The dimensions are columns, rows, heads, batch. For packed tensors they are columns, rows
// (twice), heads, and a fifth dimension whose stride subtracts the rows that were counted twice:
// see box_of_rows() in sm90/tma.cuh. kRowsOfMap times kWrap is 2^64, which is 0 for addresses of 64
// bits. A map that begins some rows before the tensor would need fewer dimensions, but TMA faults
// on memory that is not mapped, even if no box contains it. If boxes have several heads, heads come
// before rows: see box_of_group().
inline TensorMapSpec tensor_map(int d_head, DType dtype, const ForwardProblem& p, bool packed,
                                const CopiedTensor& tensor) {
    const uint32_t columns = d_head % 64 == 0 ? 64 : 32;
    const auto box_rows = static_cast<uint32_t>(tensor.box_rows);
    const uint64_t d = tensor.columns > 0 ? tensor.columns : p.d, rows = tensor.rows,
                   heads = tensor.heads, batch = p.batch;
    const uint64_t head = stride_bytes(tensor, "head", tensor.strides.head, tensor.heads);
    TensorMapSpec map{
        .argument_offset = tensor.argument_offset,
        .place = in_tensor(tensor.index),
        .name = tensor.name,
        .element_type = static_cast<int>(dtype),
        .sizes = {},
        .strides_bytes = {},
        .box = {},
        .swizzle_bytes = static_cast<int>(columns) * kElementBytes,
    };
    if (packed) {
        const uint64_t row = stride_bytes(tensor, "row", tensor.strides.seq, tensor.total);
        require(row < kWrap, std::string(tensor.name) + ": its row stride is " +
                                 std::to_string(tensor.strides.seq) +
                                 " elements; packed sequences take less than 2^33");
        map.sizes = {d, kRowsOfMap, static_cast<uint64_t>(tensor.total) + 1, heads, kRowsOfMap + 1};
        map.strides_bytes = {row, row, head, kWrap - row};
        map.box = {columns, box_rows, 1, 1, 1};
    } else {
        const uint64_t row = stride_bytes(tensor, "row", tensor.strides.seq, tensor.rows);
        map.sizes = {d, rows, heads, batch};
        map.strides_bytes = {row, head,
                             stride_bytes(tensor, "batch", tensor.strides.batch, p.batch)};
        map.box = {columns, box_rows, 1, 1};
    }
    if (tensor.box_heads > 0) {
        const size_t heads_at = packed ? 3 : 2;
        const auto to_front = [](auto& values, size_t from, size_t to) {
            std::rotate(values.begin() + to, values.begin() + from, values.begin() + from + 1);
        };
        to_front(map.sizes, heads_at, 1);
        to_front(map.strides_bytes, heads_at - 1, 0);
        to_front(map.box, heads_at, 1);
        map.box[1] = tensor.box_heads;
        map.box[2] = box_rows / tensor.box_heads;
    }
    return map;
}

}  // namespace flashsmith
