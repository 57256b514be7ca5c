// topology.yaml: what the ranks are joined by.
#pragma once

#include "compiler/frontend/diagnostics.h"
#include "ir/ir.h"

#include <optional>
#include <string>

namespace reshard {

struct Node;

/// A topology's map. Only `ranks_per_node` is asked for; the rest has the values of ir::Topology.
std::optional<ir::Topology> readTopology(const Node &node, Diagnostics &diagnostics);

/// A topology file, as `options.topology` and `reshard-inspect --simulate` name it.
std::optional<ir::Topology> readTopologyFile(const std::string &path, Diagnostics &diagnostics);

} // namespace reshard
