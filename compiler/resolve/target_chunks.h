// SPDX-License-Identifier: Apache-2.0
// Cuts the params of a target checkpoint into the chunks in which its files store them.
#pragma once

#include "compiler/resolve/endpoint_context.h"
#include "compiler/resolve/tensors.h"

#include <vector>

namespace reshard {

/// Distributes the params of a target, which each lie whole on its only mesh rank, over one mesh rank for each chunk.
/// The chunks of a tensor are a grid of pieces of at most `chunkBytes` of the declaration (none: 64 MiB, or more if
/// there would be too many): its first dimension is cut, and the next one only if one position of the first is larger
/// than that. Each cut dimension has an axis, and the mesh ranks that hold a param are its chunks in row-major order.
/// Flat buffers, opaque tensors and quantized params (by their `forms`) stay in one chunk. An error: too many mesh
/// ranks.
void cutIntoChunks(const Tensors &tensors, EndpointContext &context, const std::vector<StorageRule> &forms,
                   Diagnostics &diagnostics);

} // namespace reshard
