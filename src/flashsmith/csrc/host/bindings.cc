// The functions of a kernel library that Python calls; tvm-ffi exports them. They are compiled
// once, by g++, because the headers of tvm-ffi would cost seconds of nvcc in every .cu file.
//
// Tensors arrive as addresses. Their strides are among the numbers of the operation, exactly as
// Python has checked them. DLPack cannot describe a read-only NumPy array, or a problem whose
// tensors do not exist yet. A call is one flat list of numbers, because each nested tuple would
// cost a microsecond, more than the rest of the call.
#include <tvm/ffi/tvm_ffi.h>

#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/kernel_library.h"
#include "host/launcher.h"
#include "host/plan.h"

namespace flashsmith {
namespace {

namespace ffi = tvm::ffi;

using Int = int64_t;

constexpr size_t kMostTensors = 32;  // of an operation

// The arguments of one call, read from the first to the last.
class Arguments {
  public:
    Arguments(const ffi::AnyView* values, int32_t count) : values_(values), count_(count) {}

    Int integer() { return next().cast<Int>(); }
    int small_integer() { return static_cast<int>(integer()); }
    NumberReader::Number number() {
        const ffi::AnyView value = next();
        if (value.type_index() == ffi::TypeIndex::kTVMFFIFloat) return value.cast<double>();
        return value.cast<Int>();
    }
    uintptr_t address() { return static_cast<uintptr_t>(integer()); }
    // The next address, or 0 if no arguments are left.
    uintptr_t address_if_given() { return used_ == count_ ? 0 : address(); }
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

DeviceSpec device_spec(Arguments& args) {
    return {args.small_integer(), args.small_integer(), args.small_integer(), args.small_integer()};
}

// The addresses of the operation's tensors. Addresses at the end may be left out; they are 0.
using Addresses = std::array<uintptr_t, kMostTensors>;

// A call that has been planned. Its arguments are: the index of the config in configs(), the
// device, the count of the operation's numbers, these numbers, and the addresses of all tensors.
struct PlannedCall {
    const LibraryConfig& config;
    Addresses tensors;
    Plan plan;
};

PlannedCall plan_call(Arguments& args) {
    const KernelLibrary& library = kernel_library();
    require(library.n_tensors <= kMostTensors,
            "an operation has at most " + std::to_string(kMostTensors) + " tensors");
    const Int index = args.integer();
    if (index < 0 || index >= static_cast<Int>(library.configs.size()))
        throw std::out_of_range("index: this library has no such config");
    const LibraryConfig& config = library.configs[index];
    const DeviceSpec device = device_spec(args);
    const Int count = args.integer();
    std::vector<NumberReader::Number> numbers;
    for (Int i = 0; i < count; ++i) numbers.push_back(args.number());
    Addresses tensors{};
    for (size_t i = 0; i < library.n_tensors; ++i) tensors[i] = args.address();
    NumberReader reader(numbers);
    Plan plan = config.plan(reader, {tensors.data(), library.n_tensors}, device);
    reader.end();
    plan.check(config.kernels.size(), library.n_tensors);
    return {config, tensors, std::move(plan)};
}

template <typename Range>
ffi::Array<Int> to_ints(const Range& values) {
    const std::vector<Int> ints(values.begin(), values.end());
    return ffi::Array<Int>(ints.begin(), ints.end());
}

// Describes a tensor map. Its data begin at the address of a tensor, or at a byte offset in the
// workspace with the given index.
ffi::Array<ffi::Any> describe(const TensorMapSpec& map, Tensors tensors) {
    const Place& place = map.place;
    const Int at = place.is_workspace ? place.byte_offset : Buffers{tensors, {}}.address(place);
    return {static_cast<Int>(map.argument_offset),
            at,
            map.element_type,
            to_ints(map.sizes),
            to_ints(map.strides_bytes),
            to_ints(map.box),
            map.swizzle_bytes,
            place.is_workspace ? static_cast<Int>(place.index) : Int{-1}};
}

// Describes a launch. Its arguments contain the addresses of tensors, but not yet those of
// workspaces.
ffi::Array<ffi::Any> describe(const Launch& launch, size_t n_workspaces, Tensors tensors) {
    std::vector<uint8_t> arguments = launch.argument_bytes;
    const std::vector<uintptr_t> nowhere(n_workspaces);
    launch.write_addresses({tensors, nowhere}, arguments.data());
    ffi::Array<ffi::Any> patches, tensor_maps;
    for (const AddressPatch& patch : launch.addresses)
        if (patch.place.is_workspace)
            patches.push_back(ffi::Array<Int>{static_cast<Int>(patch.argument_offset),
                                              static_cast<Int>(patch.place.index),
                                              static_cast<Int>(patch.place.byte_offset)});
    for (const TensorMapSpec& map : launch.tensor_maps)
        tensor_maps.push_back(describe(map, tensors));
    const auto* bytes = reinterpret_cast<const char*>(arguments.data());
    return {static_cast<Int>(launch.kernel),
            to_ints(launch.grid),
            to_ints(launch.cluster),
            to_ints(launch.block),
            launch.smem_bytes,
            ffi::Bytes(bytes, arguments.size()),
            patches,
            tensor_maps,
            launch.programmatic};
}

// Turns exceptions into Python's: a bad argument becomes a ValueError, a failed launch a
// RuntimeError.
template <typename Body>
void translate_exceptions(const Body& body) {
    try {
        body();
    } catch (const std::invalid_argument& error) {
        TVM_FFI_THROW(ValueError) << error.what();
    }
}

// ---- exported functions ----

// Returns the launches in their order, and the workspaces.
ffi::Any plan(Arguments& args) {
    const PlannedCall call = plan_call(args);
    args.end();
    const Tensors tensors{call.tensors.data(), kernel_library().n_tensors};
    ffi::Array<ffi::Any> launches, workspaces;
    for (const Launch& launch : call.plan.launches)
        launches.push_back(describe(launch, call.plan.workspaces.size(), tensors));
    for (const Workspace& workspace : call.plan.workspaces)
        workspaces.push_back(ffi::Array<ffi::Any>{ffi::String(workspace.name),
                                                  static_cast<Int>(workspace.bytes),
                                                  static_cast<Int>(workspace.contents)});
    return ffi::Array<ffi::Any>{launches, workspaces};
}

// Takes the arguments of plan(), the ordinal of the GPU, and whether launches are timed. Returns a
// function, and the size in bytes of the workspaces that a caller of this function may provide.
//
// The function takes the handle of a stream, the addresses of the tensors (0 for tensors that are
// not given), and the address of the workspaces. Zeros at the end may be left out. It launches the
// plan on these tensors. If launches are timed, it waits for them and returns milliseconds.
ffi::Any prepare(Arguments& args) {
    PlannedCall call = plan_call(args);
    const int ordinal = args.small_integer();
    const bool timed = args.integer() != 0;
    args.end();
    const auto prepared =
        std::make_shared<const PreparedPlan>(std::move(call.plan), call.config.kernels, ordinal);
    const auto launch = [=](const ffi::AnyView* values, int32_t count, ffi::Any* result) {
        translate_exceptions([&] {
            const KernelLibrary& library = kernel_library();
            Arguments args(values, count);
            void* stream = reinterpret_cast<void*>(args.address());
            Addresses tensors{};
            for (size_t i = 0; i < library.n_tensors; ++i)
                tensors[i] = i < library.n_required ? args.address() : args.address_if_given();
            const uintptr_t block = prepared->block_bytes() > 0 ? args.address_if_given() : 0;
            args.end();
            const Tensors at{tensors.data(), library.n_tensors};
            if (timed)
                *result = prepared->launch_timed(at, block, stream);
            else
                prepared->launch(at, block, stream);
        });
    };
    return ffi::Array<ffi::Any>{ffi::Function::FromPacked(launch),
                                static_cast<Int>(prepared->block_bytes())};
}

ffi::Any configs(Arguments& args) {
    args.end();
    ffi::Array<ffi::Array<Int>> list;
    for (const LibraryConfig& config : kernel_library().configs)
        list.push_back(to_ints(config.numbers));
    return list;
}

ffi::Any semantics(Arguments& args) {
    args.end();
    return to_ints(kernel_library().semantics);
}

int export_call(ffi::Any (*function)(Arguments&), const TVMFFIAny* values, int32_t count,
                TVMFFIAny* result) {
    TVM_FFI_SAFE_CALL_BEGIN();
    Arguments args(reinterpret_cast<const ffi::AnyView*>(values), count);
    translate_exceptions([&] { *reinterpret_cast<ffi::Any*>(result) = function(args); });
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
