#include "host/plan.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "common/types.cuh"

namespace flashsmith {
namespace {

// Workspaces are aligned so that kernels can use vector instructions on them.
constexpr size_t kKeptAlignment = 16;
constexpr size_t kTensorMapBytes = sizeof(TensorMap);

size_t aligned(size_t bytes, size_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

const NumberReader::Number& NumberReader::next() {
    require(used_ < numbers_.size(), "fewer numbers than the operation takes");
    return numbers_[used_++];
}

int64_t NumberReader::integer() {
    const auto* const value = std::get_if<int64_t>(&next());
    require(value != nullptr,
            "number " + std::to_string(used_) + " of the call must be an integer");
    return *value;
}

double NumberReader::number() {
    return std::visit([](auto value) { return static_cast<double>(value); }, next());
}

int32_t NumberReader::bits() {
    const Number& value = next();
    if (const auto* const integer = std::get_if<int64_t>(&value)) {
        require(*integer >= INT32_MIN && *integer <= INT32_MAX,
                "number " + std::to_string(used_) + " of the call must be an int32");
        return static_cast<int32_t>(*integer);
    }
    return std::bit_cast<int32_t>(static_cast<float>(std::get<double>(value)));
}

void NumberReader::end() const {
    require(used_ == numbers_.size(), "more numbers than the operation takes");
}

void Launch::write_addresses(const Buffers& buffers, uint8_t* arguments) const {
    for (const AddressPatch& patch : addresses) {
        const uintptr_t address = buffers.address(patch.place);
        std::memcpy(arguments + patch.argument_offset, &address, sizeof address);
    }
}

void Plan::check_presence(Tensors tensors) const {
    for (const Presence& known : presence)
        if ((tensors[known.tensor] != 0) != known.is_given)
            throw std::invalid_argument(known.otherwise);
}

void Plan::check(size_t n_kernels, size_t n_tensors) const {
    const auto expect = [](bool condition, const char* what) {
        if (!condition) throw std::runtime_error(std::string("the family's plan: ") + what);
    };
    expect(workspaces.size() <= kMostWorkspaces, "more than 16 workspaces");
    size_t kept_bytes = layout_of(workspaces).kept_bytes;
    for (const Workspace& space : workspaces)  // rejects negative sizes, whose sum may wrap
        if (space.contents == Contents::kept_zero) kept_bytes = std::max(kept_bytes, space.bytes);
    if (kept_bytes > kMostKeptBytes)
        throw std::runtime_error("the family's plan: " + std::to_string(kept_bytes) +
                                 " bytes of workspaces that are kept zero; at most " +
                                 std::to_string(kMostKeptBytes));
    for (const Launch& launch : launches) {
        const size_t bytes = launch.argument_bytes.size();
        const auto check_part = [&](size_t offset, size_t size, const Place& place) {
            expect(offset <= bytes && size <= bytes - offset, "it writes beyond its arguments");
            expect(place.index < (place.is_workspace ? workspaces.size() : n_tensors),
                   "it names a buffer that does not exist");
        };
        expect(launch.kernel < n_kernels, "it launches a kernel that the config does not have");
        expect(bytes <= kMostArgumentBytes, "a kernel takes at most 4,096 bytes of arguments");
        for (const AddressPatch& patch : launch.addresses)
            check_part(patch.argument_offset, sizeof(uintptr_t), patch.place);
        for (const TensorMapSpec& map : launch.tensor_maps)
            check_part(map.argument_offset, kTensorMapBytes, map.place);
    }
    for (const Presence& known : presence)
        expect(known.tensor < n_tensors, "it names a tensor that does not exist");
}

WorkspaceLayout layout_of(const std::vector<Workspace>& workspaces) {
    WorkspaceLayout layout{std::vector<size_t>(workspaces.size()), 0, 0, 0};
    const auto place = [&](Contents contents, size_t& end, size_t alignment) {
        for (size_t i = 0; i < workspaces.size(); ++i) {
            if (workspaces[i].contents != contents) continue;
            layout.offsets[i] = end;
            end = aligned(end + workspaces[i].bytes, alignment);
        }
    };
    place(Contents::kept_zero, layout.kept_bytes, kKeptAlignment);
    place(Contents::zeroed, layout.block_bytes, kWorkspaceAlignment);
    layout.zeroed_bytes = layout.block_bytes;
    place(Contents::undefined, layout.block_bytes, kWorkspaceAlignment);
    return layout;
}

}  // namespace flashsmith
