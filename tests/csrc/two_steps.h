// A plan of two launches over four workspaces, for operations that take two numbers and have a
// tensor to read at place 0 and one to write at place 3: what test_plans.py launches and emulates.
#pragma once

#include <cstring>
#include <utility>

#include "host/plan.h"

namespace flashsmith {

struct PartsArgs {
    const void *x, *scratch, *sums, *counter;
};
struct MergeArgs {
    const void *scratch, *sums, *o, *counter;
};

template <class Args>
Launch step_of(size_t kernel, uint32_t ctas, std::vector<Place> places) {
    Launch launch{
        .kernel = kernel,
        .grid = {ctas, 1, 1},
        .cluster = {1, 1, 1},
        .block = {32, 1, 1},
        .smem_bytes = static_cast<int>(1024 * (kernel + 1)),
        .argument_bytes = std::vector<uint8_t>(sizeof(Args)),
        .addresses = {},
        .tensor_maps = {},
    };
    for (size_t i = 0; i < places.size(); ++i)
        launch.addresses.push_back({i * sizeof(void*), places[i]});
    return launch;
}

// One launch over nothing but memory that is kept zero.
inline Plan plan_of_kept(size_t bytes) {
    Plan plan;
    plan.workspaces = {{"counters", bytes, Contents::kept_zero}};
    plan.launches.push_back(
        step_of<PartsArgs>(0, 1, {in_tensor(0), in_tensor(0), in_tensor(0), in_workspace(0)}));
    return plan;
}

// Where `wrong` is not 0, something about the plan is, or is unusual; where it is negative, there
// is one launch over as many bytes that are kept zero. Each of n x 32 elements of x, doubled, is
// scratch; every fourth one adds to the same sum.
inline Plan plan_two_steps(NumberReader& numbers) {
    const auto ctas = static_cast<uint32_t>(numbers.integer());
    const int64_t wrong = numbers.integer();
    if (wrong < 0) return plan_of_kept(static_cast<size_t>(-wrong));
    const size_t bytes = 128 * ctas;
    Plan plan;
    plan.workspaces = {{"padding", 40, Contents::undefined},
                       {"scratch", bytes, Contents::undefined},
                       {"counter", 4, Contents::kept_zero},
                       {"sums", 16 + 300, Contents::zeroed}};
    plan.launches.push_back(step_of<PartsArgs>(
        0, ctas, {in_tensor(0), in_workspace(1), in_workspace(3, 300), in_workspace(2)}));
    plan.launches.push_back(step_of<MergeArgs>(
        1, ctas, {in_workspace(1), in_workspace(3, 300), in_tensor(3), in_workspace(2)}));
    switch (wrong) {
        case 1:
            plan.launches[0].kernel = 2;
            break;
        case 2:
            plan.launches[1].addresses[0].argument_offset = sizeof(MergeArgs) - 4;
            break;
        case 3:
            plan.launches[1].addresses[0].place = in_workspace(4);
            break;
        case 4:
            plan.launches[0].addresses[0].place = in_tensor(11);
            break;
        case 5:
            plan.presence.push_back({11, true, ""});
            break;
        case 6:
            plan.workspaces.resize(17);
            break;
        case 7:
            plan.launches[0].argument_bytes.resize(4097);
            break;
        case 8:
            plan.launches[0].tensor_maps = {{0, in_tensor(0), "x", 5, {1}, {}, {1}, 0}};
            break;
        case 9:
            plan.workspaces[2].bytes = kMostKeptBytes + 1;
            break;
        case 10:  // nothing: the first kernel is launched a second time, with less memory
            plan.launches.push_back(plan.launches[0]);
            plan.launches.back().smem_bytes = 512;
            break;
        case 11:  // nothing either
            plan.launches[1].programmatic = true;
            break;
        case 12:
            plan.launches[0].cluster = {3, 1, 1};
            break;
        case 15:
            plan.workspaces[2].bytes = static_cast<size_t>(-4);
            break;
        case 14:  // nothing: more memory than other plans of the kernel
            plan.launches[0].smem_bytes = 60'000;
            break;
        case 13:
            plan.launches[1].argument_bytes.resize(256);
            plan.launches[1].tensor_maps = {
                {128, in_tensor(0), "x", 5, {64, 8, 1, 1}, {128, 1024, 1024}, {64, 8, 1, 1}, 128}};
            break;
    }
    return plan;
}

}  // namespace flashsmith
