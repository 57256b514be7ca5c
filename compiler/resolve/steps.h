// SPDX-License-Identifier: Apache-2.0
// resolve(), and its steps that have a file of their own, in their order: names, storage forms, quantized params,
// stored chunks of a source, chunks of a target, and the check that the source holds every element.
#pragma once

#include "base/yaml/diagnostics.h"
#include "compiler/frontend/frontend.h"
#include "compiler/resolve/endpoint_context.h"
#include "compiler/resolve/tensors.h"
#include "ir/ir.h"

#include <string>
#include <vector>

namespace reshard {

/// Computes the layout IR of a job: tensor patterns, shardings, params, mesh ranks. An error about two sides that
/// disagree names both. nullopt after an error.
std::optional<ir::Layout> resolve(const Job &job, Diagnostics &diagnostics, const Allowed &allowed = {});

/// For each tensor pattern, whether any mesh rank of the source holds an element of it. If some of its elements are on
/// no mesh rank, reports an error at the param that holds the others, or with `gaps` a warning.
std::vector<bool> checkSourceCoverage(const ir::Layout &layout, const std::vector<Location> &declaredAt, bool gaps,
                                      Diagnostics &diagnostics);

/// Reports params with the same name on one mesh rank, at the declaration of the later one. `titles`, by param: the
/// names in messages of params without a declaration ("the scales of param 'x'"); empty for the others.
void checkParamNames(const ir::Layout &layout, const ir::Endpoint &endpoint, const std::vector<Location> &declaredAt,
                     const std::vector<std::string> &titles, Diagnostics &diagnostics);

/// Reports tensors with the same name. `tensors`: name pattern, variables and existing values of each, tied ones too.
void checkTensorNames(const ir::Layout &layout, const std::vector<ir::TensorPattern> &tensors,
                      const std::vector<Location> &declaredAt, Diagnostics &diagnostics);

/// Whether a dtype can be cast to others.
bool castable(ir::DType type);
/// Whether every value of `from` is a value of `to`.
bool widens(ir::DType from, ir::DType to);

/// Separates storage dtypes from sent dtypes. On entry each param's dtype is its storage dtype. Tensors get the dtype
/// of the source's params, in which they are sent. Target params get the dtype of their tensors; if their own differs
/// and they have no transform, it becomes their storageDtype. Errors: a source that stores a tensor in two dtypes, a
/// target param of tensors that are sent in several, dtypes without a cast, rounding without `convert: rne`.
void resolveStorageForms(const std::vector<std::vector<Location>> &paramsAt,
                         const std::vector<std::vector<StorageRule>> &forms, ir::Layout &layout,
                         Diagnostics &diagnostics);

/// Warns if two params of the source hold the same elements in forms that differ in value: quantized in two formats, or
/// one quantized and one not. Replicas in a target may then differ.
void warnOnMixedForms(const std::vector<Location> &paramsAt, const std::vector<StorageRule> &forms,
                      const ir::Layout &layout, Diagnostics &diagnostics);

/// The name of a param that is stored for the quantized param `name`: replaces {name} in a pattern of its rule.
std::string quantizedName(const std::string &pattern, const std::string &name);

/// Replaces each param with a `quantize` by the param of its codes, and appends the params of its scales and its
/// quantized views (ir::QuantizedView), to `paramsAt` and `forms` as well. Adds tensors for codes and scales that are
/// sent. Reports params that cannot be quantized (docs/yaml.md, section 12); warns if `by: sender` is not possible.
void quantizeParams(std::vector<std::vector<Location>> &paramsAt, std::vector<std::vector<StorageRule>> &forms,
                    ir::Layout &layout, Diagnostics &diagnostics);

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

/// Distributes the params of a target, which each lie whole on its only mesh rank, over one mesh rank for each chunk.
/// The chunks of a tensor are a grid of pieces of at most `chunkBytes` of the declaration (none: 64 MiB, or more if
/// there would be too many): its first dimension is cut, and the next one only if one position of the first is larger
/// than that. Each cut dimension has an axis, and the mesh ranks that hold a param are its chunks in row-major order.
/// Flat buffers, opaque tensors and quantized params (by their `forms`) stay in one chunk. An error: too many mesh
/// ranks.
void cutIntoChunks(const Tensors &tensors, EndpointContext &context, const std::vector<StorageRule> &forms,
                   Diagnostics &diagnostics);

} // namespace reshard
