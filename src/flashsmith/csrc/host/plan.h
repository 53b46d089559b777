// The single host path: a call of an operation becomes a plan. The launcher runs the plan on a GPU,
// and the emulator runs the same plan on the CPU. Plain C++20 without CUDA headers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace flashsmith {

// Everything about a device that a plan may depend on. The caller provides it; nothing here queries
// a device.
struct DeviceSpec {
    int arch;  // 80 for sm_80
    int sm_count;
    int max_smem_per_block;  // bytes a CTA may opt in to
    int max_smem_per_sm;     // bytes
};

// The addresses of the caller's tensors in the operation's order; 0 for those not given.
using Tensors = std::span<const uintptr_t>;

// Reads the numbers of a call, in the operation's order. Throws std::invalid_argument if there are
// too few numbers, or if a number that must be an integer is not.
class NumberReader {
  public:
    using Number = std::variant<int64_t, double>;

    explicit NumberReader(std::span<const Number> numbers) : numbers_(numbers) {}

    int64_t integer();
    double number();
    // The bits of an int32, or of an fp32 if the number is not an integer. Throws
    // std::invalid_argument for an integer beyond int32.
    int32_t bits();
    // Checks that all numbers were read.
    void end() const;

  private:
    const Number& next();

    std::span<const Number> numbers_;
    size_t used_ = 0;
};

// The contents of a workspace when the first launch of a call begins.
enum class Contents : int {
    undefined = 0,  // anything
    zeroed = 1,     // zero in every call
    kept_zero = 2,  // zero, because earlier launches left it so; at most 1 MiB per plan
};

// Device memory that a call needs in addition to its tensors.
struct Workspace {
    std::string name;
    size_t bytes;
    Contents contents;
};

// A byte offset into one of the call's tensors or one of the plan's workspaces.
struct Place {
    bool is_workspace;
    size_t index;
    size_t byte_offset;
};

constexpr Place in_tensor(size_t index, size_t byte_offset = 0) {
    return {false, index, byte_offset};
}
constexpr Place in_workspace(size_t index, size_t byte_offset = 0) {
    return {true, index, byte_offset};
}

// The addresses of the buffers of one call.
struct Buffers {
    Tensors tensors;
    std::span<const uintptr_t> workspaces;

    // 0 for a tensor that is not given.
    uintptr_t address(const Place& place) const {
        const uintptr_t begin = (place.is_workspace ? workspaces : tensors)[place.index];
        return begin == 0 ? 0 : begin + place.byte_offset;
    }
};

// Where an address belongs in a kernel's arguments, in bytes.
struct AddressPatch {
    size_t argument_offset;
    Place place;
};

// How a tensor map must be encoded, and where it belongs in the arguments. The launcher encodes it
// with the driver; the emulator reads it directly. Boxes take every element, and elements outside
// the tensor are zero.
struct TensorMapSpec {
    size_t argument_offset;  // bytes from the start of the kernel's arguments
    Place place;
    std::string name;  // the tensor's name in errors
    int element_type;  // a DType
    std::vector<uint64_t> sizes;
    std::vector<uint64_t> strides_bytes;  // of dimensions 1 and up
    std::vector<uint32_t> box;
    int swizzle_bytes;
};

struct Launch {
    size_t kernel;  // index among the config's kernels; 0 is the main one
    std::array<uint32_t, 3> grid, cluster, block;
    int smem_bytes;                       // dynamic shared memory of one CTA
    std::vector<uint8_t> argument_bytes;  // without addresses and tensor maps, which are written
                                          // later
    std::vector<AddressPatch> addresses;
    std::vector<TensorMapSpec> tensor_maps;  // empty for kernels without TMA
    // Whether this launch may begin before the preceding one is over (programmatic dependent
    // launch, from compute capability 9.0 on). Its kernel then waits with griddepcontrol.wait.
    bool programmatic = false;

    bool is_empty() const { return grid[0] == 0; }
    bool has_clusters() const { return cluster != std::array<uint32_t, 3>{1, 1, 1}; }
    // Writes the buffers' addresses into a copy of the arguments.
    void write_addresses(const Buffers& buffers, uint8_t* arguments) const;
};

// A tensor that every call of a plan must be given, or must not be given, and the error otherwise.
struct Presence {
    size_t tensor;
    bool is_given;
    std::string otherwise;
};

// Launches run in order, and each sees what earlier ones have written. A launch with an empty grid
// is skipped: a problem without rows launches nothing.
struct Plan {
    std::vector<Launch> launches;
    std::vector<Workspace> workspaces;
    std::vector<Presence> presence;

    // Checks `presence`. Throws std::invalid_argument.
    void check_presence(Tensors tensors) const;
    // Checks that the plan uses existing kernels, tensors and workspaces, and stays within its
    // arguments. Throws std::runtime_error, since otherwise the family's planning is wrong.
    void check(size_t n_kernels, size_t n_tensors) const;
};

// The locations of a plan's workspaces. Those that are kept zero have separate memory. The others
// share one block, which begins with those to be zeroed.
struct WorkspaceLayout {
    std::vector<size_t> offsets;
    size_t zeroed_bytes, block_bytes, kept_bytes;
};
constexpr size_t kWorkspaceAlignment = 256;
constexpr size_t kMostWorkspaces = 16;
constexpr size_t kMostKeptBytes = size_t{1} << 20;
constexpr size_t kMostArgumentBytes = 4096;
WorkspaceLayout layout_of(const std::vector<Workspace>& workspaces);

// Throws std::invalid_argument unless the condition holds.
void require(bool condition, const std::string& message);

}  // namespace flashsmith
