// SPDX-License-Identifier: Apache-2.0
#include "report/simulate/lower_bound.h"

#include "schema/flatbuffer_vectors.h"

#include <algorithm>

namespace reshard::report {

using namespace schema;

namespace {

const char *nameOf(CutKind kind) {
  switch (kind) { // without a default: a new kind is a warning of the compiler
  case CutKind::rank_ingress:
    return "ingress of one rank";
  case CutKind::shared_nic_ingress:
    return "ingress of ranks with one NIC";
  case CutKind::node_ingress:
    return "ingress of one node's NICs";
  case CutKind::node_rest_ingress:
    return "ingress of a node's rest";
  case CutKind::rank_egress:
    return "egress of source ranks";
  case CutKind::node_egress:
    return "egress of source NICs";
  case CutKind::local_copies:
    return "local copies of one rank";
  case CutKind::replica_node_ingress:
    break;
  }
  return "ingress of a replica's NICs";
}

double secondsOf(const Cut &cut, const Topology &topology) {
  const double rate = static_cast<double>(cut.links()) * static_cast<double>(topology.linkRate) +
                      static_cast<double>(cut.nics()) * static_cast<double>(topology.nicRate) +
                      static_cast<double>(cut.copies()) * static_cast<double>(topology.copyRate);
  const int64_t latency = cut.links() == 0  ? (cut.nics() == 0 ? 0 : topology.nicLatency)
                          : cut.nics() == 0 ? topology.linkLatency
                                            : std::min(topology.linkLatency, topology.nicLatency);
  return static_cast<double>(cut.bytes()) / rate + static_cast<double>(latency) * 1e-9;
}

} // namespace

std::optional<LowerBound> lowerBound(const Manifest &manifest, const Topology &topology,
                                     const std::function<bool(CutKind)> &counts) {
  const LowerBounds *bounds = manifest.lower_bounds();
  if (!bounds || !bounds->cuts() || bounds->ranks_per_node() != static_cast<uint64_t>(topology.ranksPerNode) ||
      bounds->nics_per_node() != static_cast<uint64_t>(topology.nicsPerNode))
    return std::nullopt;
  LowerBound result;
  for (const Cut *cut : *bounds->cuts())
    if (cut->bytes() > 0 && counts(cut->kind())) {
      result.terms.push_back({nameOf(cut->kind()), secondsOf(*cut, topology)});
      result.seconds = std::max(result.seconds, result.terms.back().seconds);
    }
  return result;
}

} // namespace reshard::report
