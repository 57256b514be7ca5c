// In which dtype values stand on each side, and in which they go from one to the other.
#pragma once

#include "compiler/frontend/diagnostics.h"
#include "compiler/frontend/frontend.h"

#include <vector>

namespace reshard {

/// Whether values of a dtype can be cast.
bool castable(ir::DType type);
/// Whether every value of one dtype is one of another.
bool widens(ir::DType from, ir::DType to);

/// So far each param's dtype is what it is stored in. Tensors take the dtype of the source's params, in which they go;
/// target params take their tensors' and keep their own as `stored` where that is another and they have no transform.
/// Errors: a source that stores a tensor in two dtypes, a target param of tensors that come in several, dtypes that
/// cannot be cast, rounding without `convert: rne`.
void resolveStorageForms(const std::vector<std::vector<Location>> &paramsAt,
                         const std::vector<std::vector<StorageForm>> &forms, ir::Layout &layout,
                         Diagnostics &diagnostics);

/// Warns where two params of the source hold elements of a tensor in forms that differ in value: quantised in two
/// formats, or one quantised and one not. Replicas of a target may then differ.
void warnOnMixedForms(const std::vector<Location> &paramsAt, const std::vector<StorageForm> &forms,
                      const ir::Layout &layout, Diagnostics &diagnostics);

} // namespace reshard
