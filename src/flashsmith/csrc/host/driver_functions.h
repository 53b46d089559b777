// Functions of the CUDA driver, asked for at run time: a library loads where there is no driver.
// Plain C++20 without CUDA headers.
#pragma once

namespace flashsmith {

// The driver's function of that name in the form that CUDA `version` (12000 for 12.0) gave it; null
// where the driver is too old, or there is none.
void* driver_function(const char* name, unsigned version);

// Whether this thread has a CUDA context. Runtime calls make the device's own current where there
// is none, the driver's functions fail then.
bool has_context();

}  // namespace flashsmith
