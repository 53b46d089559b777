// The tensor maps of the kernel whose CTAs keep queries and compute dq. Plain C++20 without CUDA
// headers.
#pragma once

#include <cstddef>
#include <vector>

#include "backward/problem.h"
#include "sm90/copied_tensor.h"
#include "wgmma_dq/config.cuh"

namespace flashsmith {

inline std::vector<TensorMapSpec> dq_tensor_maps(const WgmmaDqKernelConfig& config,
                                                 const ForwardProblem& p,
                                                 const BackwardKernelArgs& args) {
    using Args = HopperDqKernelArgs;
    const Strides q_strides{args.q_batch_stride, args.q_seq_stride, args.q_head_stride};
    const Strides do_strides{args.do_batch_stride, args.do_seq_stride, args.do_head_stride};
    const Strides k_strides{args.k_batch_stride, args.k_seq_stride, args.k_head_stride};
    const Strides v_strides{args.v_batch_stride, args.v_seq_stride, args.v_head_stride};
    const CopiedTensor tensors[] = {
        {"q", q, offsetof(Args, q), q_strides, p.seq_q, p.heads_q, p.total_q, config.B_r},
        {"k", k, offsetof(Args, k), k_strides, p.seq_k, p.heads_k, p.total_k, config.B_c},
        {"v", v, offsetof(Args, v), v_strides, p.seq_k, p.heads_k, p.total_k, config.B_c, 0, false,
         p.d_v},
        {"do", d_o, offsetof(Args, d_o), do_strides, p.seq_q, p.heads_q, p.total_q, config.B_r, 0,
         false, p.d_v},
    };
    std::vector<TensorMapSpec> maps;
    for (const CopiedTensor& tensor : tensors) {
        const bool empty = tensor.is_empty(p, p.packed);
        maps.push_back(tensor_map(config.d_head, config.dtype, p, p.packed,
                                  empty ? single_row(tensor, q) : tensor));
    }
    return maps;
}

}  // namespace flashsmith
