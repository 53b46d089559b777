// Functions of the CUDA driver, looked up at run time, so that a library loads without a driver.
// Plain C++20 without CUDA headers.
#pragma once

namespace flashsmith {

// The driver's function `name` in the form that CUDA `version` (12000 for 12.0) introduced. Null
// without a driver, or if it is too old.
void* driver_function(const char* name, unsigned version);

// Whether this thread has a CUDA context. Without one, runtime calls make the device's primary
// context current, but the driver's functions fail.
bool has_context();

// The current context's id. When a context ends, its memory and graphs are gone, and a device may
// get another one later. 0 if the driver provides no id.
unsigned long long context_id();

}  // namespace flashsmith
