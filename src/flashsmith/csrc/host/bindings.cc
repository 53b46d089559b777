// What Python calls in a kernel library, exported through tvm-ffi. One g++ translation unit, built
// once: the tvm-ffi headers would cost every .cu file seconds of nvcc.
//
// Tensors arrive as an address and element strides, exactly as Python checked them: DLPack would
// carry neither a read-only NumPy array nor a problem that has no tensors yet. A call is one flat
// list of numbers: nested tuples would cost more than the rest of it, a microsecond each.
#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "host/launch_plan.h"
#include "host/launcher.h"

namespace flashsmith {
namespace {

namespace ffi = tvm::ffi;

using Int = int64_t;

// The arguments of one call, read from the first to the last.
class Arguments {
  public:
    Arguments(const ffi::AnyView* values, int32_t count) : values_(values), count_(count) {}

    Int integer() { return next().cast<Int>(); }
    int small_integer() { return static_cast<int>(integer()); }
    double number() { return next().cast<double>(); }
    template <typename T>
    T* address() {
        return reinterpret_cast<T*>(integer());
    }
    // Null when there are no more arguments.
    template <typename T>
    T* address_if_given() {
        return used_ == count_ ? nullptr : address<T>();
    }
    void end() const {
        if (used_ != count_) throw std::invalid_argument("more arguments than the call takes");
    }

  private:
    ffi::AnyView next() {
        if (used_ == count_) throw std::invalid_argument("fewer arguments than the call takes");
        return values_[used_++];
    }
    const ffi::AnyView* values_;
    int32_t count_;
    int32_t used_ = 0;
};

// In the order of the members, as ForwardCall.library_arguments (runtime/call.py) lists them.
// Initialisers in braces are evaluated from left to right.

Strides strides(Arguments& args) {
    return {args.integer(), args.integer(), args.integer()};
}

Addresses addresses(Arguments& args) {
    return {
        .q = args.address<void>(),
        .k = args.address<void>(),
        .v = args.address<void>(),
        .o = args.address<void>(),
        .lse = args.address_if_given<float>(),
        .row_max = args.address_if_given<float>(),
        .sinks = args.address_if_given<const float>(),
        .cu_seqlens_q = args.address_if_given<const int32_t>(),
        .cu_seqlens_k = args.address_if_given<const int32_t>(),
    };
}

ForwardProblem forward_problem(Arguments& args) {
    return {
        .batch = args.integer(),
        .seq_q = args.integer(),
        .seq_k = args.integer(),
        .heads_q = args.integer(),
        .heads_k = args.integer(),
        .d = args.integer(),
        .total_q = args.integer(),
        .total_k = args.integer(),
        .q = strides(args),
        .k = strides(args),
        .v = strides(args),
        .o = strides(args),
        .at = addresses(args),
        .scale = static_cast<float>(args.number()),
        .softcap = static_cast<float>(args.number()),
        .window_left = args.integer(),
        .window_right = args.integer(),
    };
}

DeviceSpec device_spec(Arguments& args) {
    return {args.small_integer(), args.small_integer(), args.small_integer(), args.small_integer()};
}

// The kernel's index in map order (configs() lists them), the problem, the device.
struct PlannedProblem {
    Addresses at;
    LaunchPlan plan;
};

PlannedProblem launch_plan(Arguments& args) {
    const Int index = args.integer();
    if (index < 0 || index >= static_cast<Int>(kernel_map().size()))
        throw std::out_of_range("index: this library has no such config");
    const ForwardProblem problem = forward_problem(args);
    const DeviceSpec device = device_spec(args);
    const auto kernel = std::next(kernel_map().begin(), index);
    return {problem.at, plan_forward(kernel->first, problem, device)};
}

template <typename Range>
ffi::Array<Int> to_ints(const Range& values) {
    const std::vector<Int> ints(values.begin(), values.end());
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
            c.optimized_softmax,
            c.kv_stages,
            c.lazy_rescale,
            c.ping_pong,
            c.min_ctas_per_sm,
            c.trim_masks,
            c.l2_group_mib};
}

ffi::Array<Int> to_ints(const HopperForwardKernelConfig& c) {
    return {static_cast<Int>(c.dtype),
            c.d_head,
            c.B_r,
            c.B_c,
            c.n_warpgroups,
            c.kv_stages,
            c.q_buffers,
            c.producer_registers,
            c.consumer_registers,
            c.overlap,
            static_cast<Int>(c.pingpong),
            c.cluster_size,
            static_cast<Int>(c.schedule),
            static_cast<Int>(c.tile_order),
            c.separate_O,
            c.rescale_threshold,
            c.section_mib,
            c.ctas_per_sm,
            c.exp2_fma_share,
            c.early_exp,
            c.stale_max,
            c.direct_O};
}

ffi::Array<ffi::Any> describe(const TensorMapSpec& map, const Addresses& at) {
    return {static_cast<Int>(map.argument_offset),
            static_cast<Int>(map.data(at)),
            map.element_type,
            to_ints(map.sizes),
            to_ints(map.strides_bytes),
            to_ints(map.box),
            map.swizzle_bytes};
}

// Where the planned kernel stands in the map: which kernel a plan launches is read back from the
// plan, not assumed from what was asked for.
Int kernel_index(const void* kernel) {
    Int index = 0;
    for (const auto& entry : kernel_map()) {
        if (entry.second == kernel) return index;
        ++index;
    }
    throw std::runtime_error("the planned kernel is not one of this library's");
}

// Python tells a bad argument (ValueError) from a failed launch (RuntimeError).
template <typename Body>
void telling_errors_apart(const Body& body) {
    try {
        body();
    } catch (const std::invalid_argument& error) {
        TVM_FFI_THROW(ValueError) << error.what();
    }
}

// ---- what is exported ----

ffi::Any plan(Arguments& args) {
    const auto [at, p] = launch_plan(args);
    args.end();
    ffi::Array<ffi::Any> tensor_maps;
    for (const TensorMapSpec& map : p.tensor_maps) tensor_maps.push_back(describe(map, at));
    const auto* bytes = reinterpret_cast<const char*>(p.argument_bytes.data());
    return ffi::Array<ffi::Any>{kernel_index(p.kernel),
                                to_ints(p.grid),
                                to_ints(p.cluster),
                                to_ints(p.block),
                                p.smem_bytes,
                                static_cast<Int>(p.workspace_bytes),
                                p.workspace_zeroed,
                                ffi::Bytes(bytes, p.argument_bytes.size()),
                                tensor_maps,
                                static_cast<Int>(p.workspace_offset)};
}

// Followed by the GPU's ordinal, and whether launches are to be timed. Gives a function of the
// stream's handle and the addresses, those at the end left out if null: it launches the plan on
// tensors that may be anywhere. Timed, it waits and returns milliseconds.
ffi::Any prepare(Arguments& args) {
    LaunchPlan plan = launch_plan(args).plan;
    const int ordinal = args.small_integer();
    const bool timed = args.integer() != 0;
    args.end();
    const auto prepared = std::make_shared<const PreparedLaunch>(std::move(plan), ordinal);
    return ffi::Function::FromPacked(
        [=](const ffi::AnyView* values, int32_t count, ffi::Any* result) {
            telling_errors_apart([&] {
                Arguments args(values, count);
                void* stream = args.address<void>();
                const Addresses at = addresses(args);
                args.end();
                if (timed)
                    *result = prepared->launch_timed(at, stream);
                else
                    prepared->launch(at, stream);
            });
        });
}

ffi::Any configs(Arguments& args) {
    args.end();
    ffi::Array<ffi::Array<Int>> list;
    for (const auto& entry : kernel_map())
        list.push_back(std::visit([](const auto& config) { return to_ints(config); }, entry.first));
    return list;
}

ffi::Any semantics(Arguments& args) {
    args.end();
    const Semantics s = kernel_semantics();
    return ffi::Array<Int>{static_cast<Int>(s.mask), s.softcap, s.packed, s.uneven};
}

int export_call(ffi::Any (*function)(Arguments&), const TVMFFIAny* values, int32_t count,
                TVMFFIAny* result) {
    TVM_FFI_SAFE_CALL_BEGIN();
    Arguments args(reinterpret_cast<const ffi::AnyView*>(values), count);
    telling_errors_apart([&] { *reinterpret_cast<ffi::Any*>(result) = function(args); });
    TVM_FFI_SAFE_CALL_END();
}

}  // namespace
}  // namespace flashsmith

#define FLASHSMITH_EXPORT(name, function)                                                       \
    extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t n, \
                                                       TVMFFIAny* result) {                     \
        return flashsmith::export_call(flashsmith::function, args, n, result);                  \
    }

FLASHSMITH_EXPORT(plan, plan)
FLASHSMITH_EXPORT(prepare, prepare)
FLASHSMITH_EXPORT(configs, configs)
FLASHSMITH_EXPORT(semantics, semantics)
