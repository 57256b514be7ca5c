// SPDX-License-Identifier: Apache-2.0
// Launches a conversion table on a GPU.
#pragma once

#include "kernels/gpu/conversion_kernel.h"

#include <cuda_runtime_api.h>

namespace reshard::kernels {

/// Enqueues all conversions of a table in device memory as one kernel. The table must have at least one tile.
cudaError_t launchConversions(const ConversionTableView &view, cudaStream_t stream);

} // namespace reshard::kernels
