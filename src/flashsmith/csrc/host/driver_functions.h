// Functions of the CUDA driver, looked up at run time: a library loads without a driver.
// Plain C++20 without CUDA headers.
#pragma once

namespace flashsmith {

// The driver's function of that name in the form that CUDA `version` (12000 for 12.0) gave it; null
// without a driver, or if it is too old.
void* driver_function(const char* name, unsigned version);

// Whether this thread has a CUDA context. Runtime calls make the device's own current where there
// is none, the driver's functions fail then.
bool has_context();

// The current context's own number: with the context its memory and graphs are gone, and a device
// may have another one later. 0 where the driver does not say.
unsigned long long context_id();

}  // namespace flashsmith
