// The one host path: a call of an operation becomes a plan; the launcher runs the plan on a GPU and
// the emulator runs the same plan on the CPU. Plain C++20 without CUDA headers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace flashsmith {

// What a plan may depend on; the caller provides it, nothing here queries a device.
struct DeviceSpec {
    int arch;  // 80 for sm_80
    int sm_count;
    int max_smem_per_block;  // bytes a CTA may opt in to
    int max_smem_per_sm;     // bytes
};

// The caller's tensors in the operation's order: their addresses, 0 for what is not given.
using Tensors = std::span<const uintptr_t>;

// What a call says beside its tensors, in the operation's order. Throws std::invalid_argument where
// there are fewer numbers, or no integer is where one should be.
class NumberReader {
  public:
    using Number = std::variant<int64_t, double>;

    explicit NumberReader(std::span<const Number> numbers) : numbers_(numbers) {}

    int64_t integer();
    double number();
    // That all were read.
    void end() const;

  private:
    const Number& next();

    std::span<const Number> numbers_;
    size_t used_ = 0;
};

// What is in a workspace when the first launch of a call begins.
enum class Contents : int {
    undefined = 0,  // anything
    zeroed = 1,     // zero, at every call
    kept_zero = 2,  // zero, because the launches before left it so; at most 1 MiB a plan
};

// Device memory that a call needs beside its tensors.
struct Workspace {
    std::string name;
    size_t bytes;
    Contents contents;
};

// Bytes into one of the call's tensors, or into one of the plan's workspaces.
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

// Where the buffers of one call are.
struct Buffers {
    Tensors tensors;
    std::span<const uintptr_t> workspaces;

    // 0 in a tensor that is not given.
    uintptr_t address(const Place& place) const {
        const uintptr_t begin = (place.is_workspace ? workspaces : tensors)[place.index];
        return begin == 0 ? 0 : begin + place.byte_offset;
    }
};

// Where in a kernel's arguments an address belongs; bytes.
struct AddressPatch {
    size_t argument_offset;
    Place place;
};

// How a tensor map is to be encoded, and where in the arguments it belongs. The launcher encodes it
// with the driver, the emulator reads it as it stands. Boxes take every element; what is outside of
// the tensor is zero.
struct TensorMapSpec {
    size_t argument_offset;  // bytes from the start of the kernel's arguments
    Place place;
    std::string name;  // what errors call the tensor
    int element_type;  // a DType
    std::vector<uint64_t> sizes;
    std::vector<uint64_t> strides_bytes;  // of dimensions 1 and up
    std::vector<uint32_t> box;
    int swizzle_bytes;
};

struct Launch {
    size_t kernel;  // which of the config's: 0 is the main one
    std::array<uint32_t, 3> grid, cluster, block;
    int smem_bytes;                       // dynamic shared memory of one CTA
    std::vector<uint8_t> argument_bytes;  // addresses and tensor maps yet to be written
    std::vector<AddressPatch> addresses;
    std::vector<TensorMapSpec> tensor_maps;  // empty for kernels without TMA
    // Whether it may begin before the launch before it is over (programmatic dependent launch, from
    // compute capability 9.0 on): its kernel waits by griddepcontrol.wait.
    bool programmatic = false;

    bool is_empty() const { return grid[0] == 0; }
    bool has_clusters() const { return cluster != std::array<uint32_t, 3>{1, 1, 1}; }
    // The buffers' addresses into a copy of the arguments.
    void write_addresses(const Buffers& buffers, uint8_t* arguments) const;
};

// A tensor that every call of a plan must be given, or must not; and what to say otherwise.
struct Presence {
    size_t tensor;
    bool is_given;
    std::string otherwise;
};

// Launches in their order, each of which sees what those before have written. One with an empty
// grid is left out: a problem without rows launches nothing.
struct Plan {
    std::vector<Launch> launches;
    std::vector<Workspace> workspaces;
    std::vector<Presence> presence;

    // Throws std::invalid_argument.
    void check_presence(Tensors tensors) const;
    // That it uses existing kernels, tensors and workspaces, and stays within its arguments.
    // Throws std::runtime_error: the family's planning is wrong.
    void check(size_t n_kernels, size_t n_tensors) const;
};

// Where a plan's workspaces lie: those that are kept zero from the start of memory of their own,
// the others, those to be zeroed first, from the start of one block.
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
