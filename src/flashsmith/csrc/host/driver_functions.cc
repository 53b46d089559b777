#include "host/driver_functions.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace flashsmith {

void* driver_function(const char* name, [[maybe_unused]] unsigned version) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    if (status == cudaSuccess && result == cudaDriverEntryPointSuccess) return found;
    cudaGetLastError();  // clears the error, so that no later call reports it
    return nullptr;
}

bool has_context() {
    static const auto get_current =
        reinterpret_cast<decltype(&cuCtxGetCurrent)>(driver_function("cuCtxGetCurrent", 4000));
    CUcontext context = nullptr;
    return get_current != nullptr && get_current(&context) == CUDA_SUCCESS && context != nullptr;
}

unsigned long long context_id() {
    static const auto get_id =
        reinterpret_cast<decltype(&cuCtxGetId)>(driver_function("cuCtxGetId", 12000));
    unsigned long long id = 0;
    return get_id != nullptr && get_id(nullptr, &id) == CUDA_SUCCESS ? id : 0;
}

}  // namespace flashsmith
