// What Python calls in a kernel library, exported through tvm-ffi. One g++ translation unit, built
// once: the tvm-ffi headers would cost every .cu file seconds of nvcc.
//
// Tensors arrive as an address and element strides, exactly as Python checked them: DLPack would
// carry neither a read-only NumPy array nor a problem that has no tensors yet.
#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "launch_plan.cuh"

namespace flashsmith {
namespace {

namespace ffi = tvm::ffi;

using Int = int64_t;
// batch, seq_q, seq_k, heads_q, heads_k, d
using SizesTuple = ffi::Tuple<Int, Int, Int, Int, Int, Int>;
// address, batch stride, seq stride, head stride
using TensorTuple = ffi::Tuple<Int, Int, Int, Int>;
// arch, SMs, shared memory per block, shared memory per SM
using DeviceTuple = ffi::Tuple<Int, Int, Int, Int>;

template <typename Range>
ffi::Array<Int> to_ints(const Range& values) {
    std::vector<Int> ints(values.begin(), values.end());
    return ffi::Array<Int>(ints.begin(), ints.end());
}

// The fields in their one order, Python's and C++'s.
ffi::Array<Int> to_ints(const FlashForwardKernelConfig& c) {
    return {static_cast<Int>(c.dtype),
            c.d_head,
            c.B_r,
            c.B_c,
            c.n_warps,
            c.async_copy,
            c.eager_load_blocks,
            c.swizzled,
            c.Q_mma_load_K_tiles,
            c.K_mma_load_K_tiles,
            c.V_mma_load_K_tiles,
            c.mma_double_buffer_loads,
            c.optimized_softmax};
}

TensorRef to_tensor(const TensorTuple& t) {
    return {reinterpret_cast<void*>(t.get<0>()), t.get<1>(), t.get<2>(), t.get<3>()};
}

DeviceSpec to_device(const DeviceTuple& d) {
    return {static_cast<int>(d.get<0>()), static_cast<int>(d.get<1>()),
            static_cast<int>(d.get<2>()), static_cast<int>(d.get<3>())};
}

// `index` counts the configs of this library in map order; configs() lists them.
LaunchPlan make_plan(Int index, const SizesTuple& sizes, const TensorTuple& q, const TensorTuple& k,
                     const TensorTuple& v, const TensorTuple& o, Int lse, double scale,
                     const DeviceTuple& device) {
    if (index < 0 || index >= static_cast<Int>(kernel_map().size())) {
        throw std::out_of_range("index: this library has no such config");
    }
    const ForwardProblem problem{
        .batch = sizes.get<0>(),
        .seq_q = sizes.get<1>(),
        .seq_k = sizes.get<2>(),
        .heads_q = sizes.get<3>(),
        .heads_k = sizes.get<4>(),
        .d = sizes.get<5>(),
        .q = to_tensor(q),
        .k = to_tensor(k),
        .v = to_tensor(v),
        .o = to_tensor(o),
        .lse = reinterpret_cast<float*>(lse),
        .scale = static_cast<float>(scale),
    };
    try {
        return plan_forward(std::next(kernel_map().begin(), index)->first, problem,
                            to_device(device));
    } catch (const std::invalid_argument& error) {
        // Python tells a bad argument (ValueError) from a failed launch (RuntimeError).
        TVM_FFI_THROW(ValueError) << error.what();
    }
}

ffi::Array<ffi::Any> describe(const TensorMapSpec& map) {
    return {static_cast<Int>(map.argument_offset),
            reinterpret_cast<Int>(map.data),
            map.element_type,
            to_ints(map.sizes),
            to_ints(map.strides_bytes),
            to_ints(map.box),
            map.swizzle_bytes};
}

// Where the planned kernel stands in the map: which kernel a plan launches is read back from the
// plan, not assumed from what was asked for.
Int kernel_index(forward_kernel_fn kernel) {
    Int index = 0;
    for (const auto& entry : kernel_map()) {
        if (entry.second == kernel) return index;
        ++index;
    }
    throw std::runtime_error("the planned kernel is not one of this library's");
}

ffi::Array<ffi::Any> plan(Int index, SizesTuple sizes, TensorTuple q, TensorTuple k, TensorTuple v,
                          TensorTuple o, Int lse, double scale, DeviceTuple device) {
    const LaunchPlan p = make_plan(index, sizes, q, k, v, o, lse, scale, device);
    ffi::Array<ffi::Any> tensor_maps;
    for (const TensorMapSpec& map : p.tensor_maps) tensor_maps.push_back(describe(map));
    const auto* bytes = reinterpret_cast<const char*>(p.argument_bytes.data());
    return {kernel_index(p.kernel),
            to_ints(p.grid),
            to_ints(p.cluster),
            to_ints(p.block),
            p.smem_bytes,
            static_cast<Int>(p.workspace_bytes),
            p.workspace_zeroed,
            ffi::Bytes(bytes, p.argument_bytes.size()),
            tensor_maps};
}

void launch_forward(Int index, SizesTuple sizes, TensorTuple q, TensorTuple k, TensorTuple v,
                    TensorTuple o, Int lse, double scale, DeviceTuple device, Int ordinal,
                    Int stream) {
    launch(make_plan(index, sizes, q, k, v, o, lse, scale, device), static_cast<int>(ordinal),
           reinterpret_cast<void*>(stream));
}

double launch_forward_timed(Int index, SizesTuple sizes, TensorTuple q, TensorTuple k,
                            TensorTuple v, TensorTuple o, Int lse, double scale, DeviceTuple device,
                            Int ordinal, Int stream) {
    return launch_timed(make_plan(index, sizes, q, k, v, o, lse, scale, device),
                        static_cast<int>(ordinal), reinterpret_cast<void*>(stream));
}

ffi::Array<ffi::Array<Int>> configs() {
    ffi::Array<ffi::Array<Int>> list;
    for (const auto& entry : kernel_map()) list.push_back(to_ints(entry.first));
    return list;
}

ffi::Array<Int> describe_device(Int ordinal) {
    const DeviceSpec d = query_device(static_cast<int>(ordinal));
    return {d.arch, d.sm_count, d.max_smem_per_block, d.max_smem_per_sm};
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch, launch_forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch_timed, launch_forward_timed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(configs, configs);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(query_device, describe_device);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_count, device_count);

}  // namespace
}  // namespace flashsmith
