// Launches a table of changes on a GPU.
#pragma once

#include "kernels/conversion_kernel.h"

#include <cuda_runtime_api.h>

namespace reshard::kernels {

/// Enqueues all changes of a table in device memory, of one tile at least, as one kernel.
cudaError_t launchConversions(const ConversionTableView &view, cudaStream_t stream);

} // namespace reshard::kernels
