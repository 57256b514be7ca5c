// SPDX-License-Identifier: Apache-2.0
// Places the params of a source by the chunks in which its files store them.
#pragma once

#include "compiler/resolve/endpoint_context.h"
#include "compiler/resolve/tensors.h"

#include <vector>

namespace reshard {

/// The params of an endpoint with the location and the storage rule of each.
struct DeclaredParams {
  std::vector<Location> &at;
  std::vector<StorageRule> &forms;
};

/// Distributes the params of a source, which each lie whole on its only mesh rank, over one mesh rank for each chunk:
/// mesh rank i has chunk i of each param. A param whose instances have different chunks becomes several. Errors:
/// params that the files lack (unless another param has the same tensors: tied weights are stored once), other shapes
/// and dtypes, chunks that cut an opaque tensor, or the codes and scales of a quantized param.
void placeStoredChunks(const ir::Layout &layout, const Tensors &tensors, EndpointContext &context,
                       DeclaredParams declared, Diagnostics &diagnostics);

} // namespace reshard
