// Launches a table of changes on a GPU.
#pragma once

#include "kernels/changes.h"

#include <cuda_runtime_api.h>

namespace reshard::kernels {

/// Enqueues all changes of a table in device memory, of one tile at least, as one kernel.
cudaError_t launchChanges(const ChangeView &view, cudaStream_t stream);

} // namespace reshard::kernels
