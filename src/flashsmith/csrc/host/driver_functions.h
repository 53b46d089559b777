// Functions of the CUDA driver. They are looked up at run time, so that a library can be loaded
// without a driver. Plain C++20 without CUDA headers.
#pragma once

namespace flashsmith {

// The function `name` of the driver, in the version that CUDA `version` (12000 for 12.0)
// introduced. Null if there is no driver, or if the driver is too old.
void* driver_function(const char* name, unsigned version);

// Whether this thread has a CUDA context. If it has none, calls of the runtime make the device's
// primary context current, but functions of the driver fail.
bool has_context();

// The id of the current context. When a context ends, its memory and its graphs are gone, and the
// device may get another context later. 0 if the driver provides no id.
unsigned long long context_id();

}  // namespace flashsmith
