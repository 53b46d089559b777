// Device memory that a launch needs beside its tensors, without waiting for any other launch.
#pragma once

#include <cstddef>

namespace flashsmith {

// `bytes` (at most kLargestWorkspace) on the current device, zero when a kernel on `stream` starts,
// provided that every kernel leaves them so. Launches on one stream run one after the other and
// share theirs; a launch that is captured into a graph gets its own for good, since replays may run
// beside anything but themselves. Throws std::runtime_error with CUDA's words.
constexpr size_t kLargestWorkspace = 64;
void* zeroed_workspace(size_t bytes, void* stream);

}  // namespace flashsmith
