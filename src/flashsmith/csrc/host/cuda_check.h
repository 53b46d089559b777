// check() for all calls of the CUDA runtime, and the mode that calls need while a stream is being
// captured.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace flashsmith {

// Throws std::runtime_error with CUDA's message.
inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // clears the error, so that no later call reports it
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ": " +
                             cudaGetErrorString(status));
}

// While an object of this class exists, this thread may allocate memory and make graphs even if a
// stream is being captured.
class RelaxedCapture {
  public:
    RelaxedCapture() {
        check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
    }
    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace flashsmith
