#include "score_sums/plan.h"

#include <climits>
#include <cstddef>

#include "backward/problem.h"

namespace flashsmith {
namespace {

constexpr uint32_t kRowsThreads = 256;
constexpr int64_t kTile = ScoreSumsKernelConfig::kTile;

// The offset of the sums' arguments. offsetof() is not defined for a derived struct.
constexpr size_t kSumsOffset = sizeof(BackwardProgramArgs);
static_assert(sizeof(ScoreSumsArgs) == kSumsOffset + sizeof(ScoreSums));

// The kernels of a config, in the order of the family's templates.
enum Kernel : size_t { main_kernel, prepare };

// The tensors of the operation, in order.
enum Tensor : size_t {
    in_do,
    in_q,
    in_k,
    in_v,
    in_o,
    in_lse,
    out_sums,
    in_dlse,
    in_sinks,
    in_cu_seqlens_q,
    in_cu_seqlens_k,
    in_first_read,
};

std::vector<AddressPatch> addresses_of_sums() {
    using Args = BackwardKernelArgs;
    return {
        {offsetof(Args, d_o), in_tensor(in_do)},
        {offsetof(Args, q), in_tensor(in_q)},
        {offsetof(Args, k), in_tensor(in_k)},
        {offsetof(Args, v), in_tensor(in_v)},
        {offsetof(Args, o), in_tensor(in_o)},
        {offsetof(Args, lse), in_tensor(in_lse)},
        {offsetof(Args, dlse), in_tensor(in_dlse)},
        {offsetof(Args, sinks), in_tensor(in_sinks)},
        {offsetof(Args, cu_seqlens_q), in_tensor(in_cu_seqlens_q)},
        {offsetof(Args, cu_seqlens_k), in_tensor(in_cu_seqlens_k)},
        {offsetof(Args, lse_log2), in_workspace(0)},
        {offsetof(Args, D), in_workspace(1)},
    };
}

}  // namespace

Plan plan_score_sums(const ScoreSumsKernelConfig& config, NumberReader& numbers, Tensors tensors,
                     const DeviceSpec& device, const Semantics& semantics) {
    ScoreSums to{};
    const bool packed = tensors[in_cu_seqlens_q] != 0 && tensors[in_cu_seqlens_k] != 0;
    auto [p, args, program] = read_backward_problem(numbers, packed, semantics, [&](auto&) {
        to.axis = static_cast<SumsAxis>(numbers.integer());
        to.batch = static_cast<int32_t>(numbers.integer());
        to.heads = static_cast<int32_t>(numbers.integer());
        to.rows = static_cast<int32_t>(numbers.integer());
        to.columns = static_cast<int32_t>(numbers.integer());
        to.batch_stride = numbers.integer();
        to.head_stride = numbers.integer();
        to.row_stride = numbers.integer();
    });
    require(device.arch >= 80, "mma.sync kernels need compute capability 8.0 or newer");
    check_smem(config.smem_bytes(), device);
    check_problem(p, semantics, config.d_head, kStatisticsRows);
    if (!semantics.uneven)
        require(p.d == config.d_head && p.seq_q % kTile == 0 && p.seq_k % kTile == 0 && p.seq_k > 0,
                "uneven: this library's kernels want whole tiles and d = d_head");

    const Statistics statistics = place_statistics(p, args);
    const size_t bytes = static_cast<size_t>(statistics.rows) * sizeof(float);
    Plan plan;
    plan.workspaces = {{"lse_log2", bytes, Contents::undefined}, {"D", bytes, Contents::undefined}};
    ScoreSumsArgs all;
    std::memset(&all, 0, sizeof all);  // zeroes padding too: equal plans have equal bytes
    static_cast<BackwardKernelArgs&>(all) = args;
    all.program = program;
    all.to = to;
    const auto* argument = reinterpret_cast<const uint8_t*>(&all);
    const auto add = [&](Kernel kernel, int64_t blocks, uint32_t threads, int smem_bytes,
                         size_t argument_bytes) {
        require(blocks <= INT_MAX, "batch x heads x blocks must stay within 2^31 - 1");
        plan.launches.push_back({
            .kernel = kernel,
            .grid = {static_cast<uint32_t>(blocks), 1, 1},
            .cluster = {1, 1, 1},
            .block = {threads, 1, 1},
            .smem_bytes = smem_bytes,
            .argument_bytes = {argument, argument + argument_bytes},
            .addresses = addresses_of_sums(),
            .tensor_maps = {},
        });
    };
    add(prepare, p.batch * p.heads_q * blocks_of(p.seq_q, kStatisticsRows), kRowsThreads, 0,
        prepare_takes_program(semantics) ? sizeof(BackwardProgramArgs) : sizeof args);
    if (prepare_takes_program(semantics))
        add_program_addresses(plan.launches.back().addresses, in_first_read, kAfterProblem);
    const int64_t q_tiles = blocks_of(p.seq_q, kTile), k_tiles = blocks_of(p.seq_k, kTile);
    const int64_t tiles[] = {q_tiles, k_tiles, q_tiles + k_tiles - 1, q_tiles * k_tiles};
    add(main_kernel, int64_t{to.batch} * to.heads * tiles[static_cast<int>(to.axis)],
        static_cast<uint32_t>(config.n_threads()), config.smem_bytes(), sizeof all);
    std::vector<AddressPatch>& addresses = plan.launches.back().addresses;
    if (semantics.has_program()) add_program_addresses(addresses, in_first_read, kAfterProblem);
    addresses.push_back({kSumsOffset + offsetof(ScoreSums, sums), in_tensor(out_sums)});
    for (const Tensor tensor : {in_cu_seqlens_q, in_cu_seqlens_k})
        plan.presence.push_back({tensor, semantics.packed,
                                 "packed: the call and this library's kernels must both use packed "
                                 "sequences, or neither"});
    plan.presence.push_back(
        {in_sinks, tensors[in_sinks] != 0,
         "sinks: this launch was planned with sinks and called without, or the reverse"});
    return plan;
}

}  // namespace flashsmith
