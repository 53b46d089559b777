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
    std::memset(&program, 0, sizeof program);  // including padding: equal plans have equal bytes
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

}  // namespace flashsmith
