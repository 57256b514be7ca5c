// SPDX-License-Identifier: Apache-2.0
// Storage forms: the dtype in which each side stores values, and the dtype in which they are sent.
#pragma once

#include "base/yaml/diagnostics.h"
#include "compiler/frontend/frontend.h"

#include <vector>

namespace reshard {

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

} // namespace reshard
