// SPDX-License-Identifier: Apache-2.0
// Makes a CUDA device current for a scope, then restores the caller's.
#pragma once

#include <cuda_runtime_api.h>

namespace reshard {

class CurrentDevice {
public:
  explicit CurrentDevice(int device) {
    cudaGetDevice(&before_);
    if (before_ != device)
      cudaSetDevice(device);
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice &) = delete;
  CurrentDevice &operator=(const CurrentDevice &) = delete;

private:
  int before_ = 0;
};

} // namespace reshard
