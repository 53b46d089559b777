#include "host/program_arguments.h"

#include <climits>
#include <cstddef>
#include <cstring>
#include <string>

#include "common/constants.cuh"

namespace flashsmith {
namespace {

size_t read_count(NumberReader& numbers, int most, const char* what) {
    const int64_t count = numbers.integer();
    require(count >= 0 && count <= most, std::string("program: it has ") + std::to_string(count) +
                                             " " + what + "; kernels take at most " +
                                             std::to_string(most));
    return static_cast<size_t>(count);
}

}  // namespace

ProgramArgs read_program(NumberReader& numbers) {
    ProgramArgs program;
    std::memset(&program, 0, sizeof program);  // zeroes padding too: equal plans have equal bytes
    const size_t reads = read_count(numbers, kMostReads, "tensors");
    for (size_t i = 0; i < reads; ++i) {
        ProgramRead& read = program.reads[i];
        for (int32_t& size : read.sizes) {
            const int64_t value = numbers.integer();
            require(value > 0 && value <= INT_MAX,
                    "program: sizes of the tensors it reads must be between 1 and 2^31 - 1");
            size = static_cast<int32_t>(value);
        }
        for (int64_t& stride : read.strides) stride = numbers.integer();
    }
    const size_t count = read_count(numbers, kMostProgramNumbers, "numbers");
    for (size_t i = 0; i < count; ++i) program.numbers[i] = numbers.bits();
    return program;
}

void scale_for_program(ForwardKernelArgs& args, ProgramArgs& program, const Semantics& semantics,
                       float scale) {
    if (!semantics.program_scores) return;
    program.scale = scale;
    args.scale_log2 = kLog2E;
}

void add_program_addresses(std::vector<AddressPatch>& patches, size_t first_tensor, size_t offset) {
    for (size_t i = 0; i < kMostReads; ++i)
        patches.push_back({offset + offsetof(ProgramArgs, reads) + i * sizeof(ProgramRead) +
                               offsetof(ProgramRead, address),
                           in_tensor(first_tensor + i)});
}

int64_t number_of_lists(const Semantics& semantics, int64_t batch, int64_t heads_q,
                        int64_t tiles_per_head) {
    return (semantics.lists_by_batch() ? batch : 1) * (semantics.mask_by_head ? heads_q : 1) *
           tiles_per_head;
}

void add_lists(Plan& plan, size_t first_kernel, int64_t lists, int64_t n_blocks, size_t offset) {
    Launch& main = plan.launches.front();
    main.addresses.push_back(
        {offset + offsetof(ProgramArgs, lists), in_workspace(plan.workspaces.size())});
    plan.workspaces.push_back(
        {"block_lists",
         static_cast<size_t>(lists * (kBlockListHeader + n_blocks)) * sizeof(int32_t),
         Contents::undefined});
    const auto helper = [&](size_t kernel, int64_t warps) {
        constexpr int kWarps = kListThreads / kWarpSize;
        const int64_t ctas = main.is_empty() ? 0 : (warps + kWarps - 1) / kWarps;
        require(ctas <= INT_MAX, "program: it needs too many lists of blocks; split the batch");
        Launch launch = main;
        launch.kernel = kernel;
        launch.grid = {static_cast<uint32_t>(ctas), 1, 1};
        launch.cluster = {1, 1, 1};
        launch.block = {kListThreads, 1, 1};
        launch.smem_bytes = 0;
        launch.tensor_maps = {};
        return launch;
    };
    plan.launches.insert(plan.launches.begin(),
                         {helper(first_kernel, lists * n_blocks), helper(first_kernel + 1, lists)});
}

}  // namespace flashsmith
