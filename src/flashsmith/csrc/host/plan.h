// The host code: turns a call of an operation into a plan. The launcher runs a plan on a GPU, and
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

// All properties of a device on which a plan may depend. The caller provides them; no code here
// queries a device.
struct DeviceSpec {
    int arch;  // 80 for sm_80
    int sm_count;
    int max_smem_per_block;  // the most bytes that a CTA can opt in to
    int max_smem_per_sm;     // bytes
};

// The addresses of the tensors of a call in the order of the operation; 0 for a tensor that is not
// given.
using Tensors = std::span<const uintptr_t>;

// Reads the numbers of a call, in the order of the operation. Throws std::invalid_argument if there
// are too few, or if a number is not an integer where it must be.
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
    zeroed = 1,     // set to zero before every call
    kept_zero = 2,  // already zero, because earlier launches left it zeroed; at most 1 MiB per plan
};

// Memory on the device that a call needs besides its tensors.
struct Workspace {
    std::string name;
    size_t bytes;
    Contents contents;
};

// A location in a tensor of a call or in a workspace of a plan, as a byte offset.
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

// The addresses of all tensors and workspaces of a call.
struct Buffers {
    Tensors tensors;
    std::span<const uintptr_t> workspaces;

    // 0 for a tensor that is not given.
    uintptr_t address(const Place& place) const {
        const uintptr_t begin = (place.is_workspace ? workspaces : tensors)[place.index];
        return begin == 0 ? 0 : begin + place.byte_offset;
    }
};

// Where an address must be written in the arguments of a kernel, in bytes.
struct AddressPatch {
    size_t argument_offset;
    Place place;
};

// How a tensor map must be encoded, and where it must be written in the arguments. The launcher
// encodes it with the driver; the emulator uses it directly. A box contains every element of its
// range, and elements outside the tensor are zero.
struct TensorMapSpec {
    size_t argument_offset;  // bytes from the start of the kernel's arguments
    Place place;
    std::string name;  // the tensor's name in errors
    int element_type;  // a DType
    std::vector<uint64_t> sizes;
    std::vector<uint64_t> strides_bytes;  // strides of dimension 1 and the following ones
    std::vector<uint32_t> box;
    int swizzle_bytes;
};

struct Launch {
    size_t kernel;  // index among the config's kernels; 0 is the main kernel
    std::array<uint32_t, 3> grid, cluster, block;
    int smem_bytes;                       // dynamic shared memory of one CTA
    std::vector<uint8_t> argument_bytes;  // without addresses and tensor maps, which are written
                                          // later
    std::vector<AddressPatch> addresses;
    std::vector<TensorMapSpec> tensor_maps;  // empty for kernels without TMA
    // Whether this launch may begin before the preceding launch has finished (programmatic
    // dependent launch, for compute capability 9.0 and later). If so, its kernel executes
    // griddepcontrol.wait.
    bool programmatic = false;

    bool is_empty() const { return grid[0] == 0; }
    bool has_clusters() const { return cluster != std::array<uint32_t, 3>{1, 1, 1}; }
    // Writes the addresses of buffers to a copy of the arguments.
    void write_addresses(const Buffers& buffers, uint8_t* arguments) const;
};

// A tensor that all calls of a plan must pass, or must not pass, and the error message for other
// calls.
struct Presence {
    size_t tensor;
    bool is_given;
    std::string otherwise;
};

// The launches of a plan run in order, so that each can read what earlier launches have written. A
// launch with an empty grid is skipped, for example if a problem has no rows.
struct Plan {
    std::vector<Launch> launches;
    std::vector<Workspace> workspaces;
    std::vector<Presence> presence;

    // Checks `presence`. Throws std::invalid_argument.
    void check_presence(Tensors tensors) const;
    // Checks that the plan uses only kernels, tensors and workspaces that exist, and writes only
    // within its arguments. Throws std::runtime_error, because the planning of the family is wrong
    // if this fails.
    void check(size_t n_kernels, size_t n_tensors) const;
};

// The locations of a plan's workspaces. Workspaces that are kept zero have their own memory. The
// others are in one block, which begins with the workspaces that must be set to zero.
struct WorkspaceLayout {
    std::vector<size_t> offsets;
    size_t zeroed_bytes, block_bytes, kept_bytes;
};
constexpr size_t kWorkspaceAlignment = 256;
constexpr size_t kMostWorkspaces = 16;
constexpr size_t kMostKeptBytes = size_t{1} << 20;
constexpr size_t kMostArgumentBytes = 4096;
WorkspaceLayout layout_of(const std::vector<Workspace>& workspaces);

// Throws std::invalid_argument if the condition does not hold.
void require(bool condition, const std::string& message);

}  // namespace flashsmith
