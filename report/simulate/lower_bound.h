// SPDX-License-Identifier: Apache-2.0
// The least time that any plan for the layouts of a plan can take, from the cuts in its manifest.
#pragma once

#include "base/topology.h"
#include "schema/manifest.h"

#include <functional>
#include <optional>
#include <vector>

namespace reshard::report {

/// One term of the lower bound: its name and its value in seconds.
struct LowerBoundTerm {
  const char *name;
  double seconds;
};

struct LowerBound {
  double seconds = 0; // the largest term; 0 if there is none
  std::vector<LowerBoundTerm> terms;
};

/// The lower bound from the cuts of the kinds for which counts(kind) holds: the time to move the bytes of a cut over
/// its links and NICs at the rates of `topology`, and the least latency with which the last of them arrive. Returns
/// nothing if the plan was compiled for a topology with other nodes.
std::optional<LowerBound> lowerBound(const schema::Manifest &manifest, const Topology &topology,
                                     const std::function<bool(schema::CutKind)> &counts);

} // namespace reshard::report
