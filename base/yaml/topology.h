// SPDX-License-Identifier: Apache-2.0
// Reads topology.yaml: the links between the ranks.
#pragma once

#include "base/topology.h"
#include "base/yaml/diagnostics.h"

#include <optional>
#include <string>

namespace reshard {

struct Node;

/// Reads a topology map. Only `ranks_per_node` is required; other keys default to the values of Topology. nullopt
/// after an error.
std::optional<Topology> readTopology(const Node &node, Diagnostics &diagnostics);

/// Reads a topology file, as given to `options.topology` or `reshard-inspect --simulate`. nullopt after an error.
std::optional<Topology> readTopologyFile(const std::string &path, Diagnostics &diagnostics);

} // namespace reshard
