// SPDX-License-Identifier: Apache-2.0
// Numbers for routes of several targets.
#pragma once

#include "ir/ir.h"

#include <vector>

namespace reshard {

/// A route of the IR names mesh ranks, which are other world ranks for each target. Its number here is equal for equal
/// world ranks: bytes that pass the same ranks are one flow, to whichever target.
class RouteNumbers {
public:
  RouteNumbers(const ir::Layout &layout, const std::vector<ir::Route> &routes);

  /// The number of a route, which may be -1 for none, of a target.
  int32_t operator()(unsigned endpoint, int32_t route) const { return route < 0 ? -1 : numbers_[endpoint][route]; }

private:
  std::vector<std::vector<int32_t>> numbers_; // by endpoint and route; -1: the endpoint lacks a mesh rank of it
};

} // namespace reshard
