// The tensor maps of kernels that read q, k, v and do in tiles and compute gradients, which are
// those of this family and of wgmma_backward. Plain C++20 without CUDA headers.
#pragma once

#include <cstddef>
#include <vector>

#include "backward/problem.h"
#include "sm90/copied_tensor.h"

namespace flashsmith {

// Args are the arguments of a kernel, which hold the four maps. If a tensor has no rows, its map
// has the address of `present` instead, a tensor that has rows whenever the kernel is launched.
template <class Args, class Config>
std::vector<TensorMapSpec> gradient_tensor_maps(const Config& config, const ForwardProblem& p,
                                                const BackwardKernelArgs& args, size_t present) {
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
                                  empty ? single_row(tensor, present) : tensor));
    }
    return maps;
}

}  // namespace flashsmith
