// Whether the source is whole: every element of every tensor that it holds at all is on some place.
#pragma once

#include "compiler/frontend/diagnostics.h"
#include "ir/ir.h"

#include <vector>

namespace reshard {

/// For each family, whether any place of the source holds an element of it. Elements of such a family that no place
/// holds are an error, at the param that holds the others; with `gaps`, a
/// warning.
std::vector<bool> checkSourceCoverage(const ir::Layout &layout, const std::vector<Location> &declaredAt, bool gaps,
                                      Diagnostics &diagnostics);

} // namespace reshard
