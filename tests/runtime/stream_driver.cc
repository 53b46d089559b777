// The functions of the CUDA driver that the host calls with a stream, as cuda.h declares them.
// Memory is the host's. There is one stream, number 77, and a wait that would last is an error.
#include <cuda.h>

#include <cstdint>
#include <cstring>

namespace {

bool is_known(CUstream stream) {
    return reinterpret_cast<uintptr_t>(stream) == 77;
}

uint32_t& word_at(CUdeviceptr address) {
    return *reinterpret_cast<uint32_t*>(address);
}

}  // namespace

extern "C" {

CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "planted words";
    return CUDA_SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    if (!is_known(stream)) return CUDA_ERROR_INVALID_HANDLE;
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* rows, CUstream stream) {
    const bool is_unified = rows->srcMemoryType == CU_MEMORYTYPE_UNIFIED &&
                            rows->dstMemoryType == CU_MEMORYTYPE_UNIFIED;
    if (!is_unified || rows->srcXInBytes || rows->srcY || rows->dstXInBytes || rows->dstY) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t row = 0; row < rows->Height; ++row) {
        const CUresult status =
            cuMemcpyAsync(rows->dstDevice + row * rows->dstPitch,
                          rows->srcDevice + row * rows->srcPitch, rows->WidthInBytes, stream);
        if (status != CUDA_SUCCESS) return status;
    }
    return CUDA_SUCCESS;
}

CUresult cuStreamBatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams* steps,
                            unsigned flags) {
    if (!is_known(stream) || count == 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; ++i) {
        if (steps[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
            const auto& write = steps[i].writeValue;
            if (write.flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
            word_at(write.address) = write.value;
            continue;
        }
        const auto& wait = steps[i].waitValue;
        if (wait.operation != CU_STREAM_MEM_OP_WAIT_VALUE_32 ||
            wait.flags != CU_STREAM_WAIT_VALUE_GEQ) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (static_cast<int32_t>(word_at(wait.address) - wait.value) < 0) {
            return CUDA_ERROR_NOT_READY;
        }
    }
    return CUDA_SUCCESS;
}
}
