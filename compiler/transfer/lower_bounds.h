// SPDX-License-Identifier: Apache-2.0
// Values that no plan can be below. The report prints them beside the plan's values.
#pragma once

#include "ir/ir.h"

#include <vector>

namespace reshard {

/// The least number of bytes that the busiest source rank must send, given the locality rule (candidates.h), except for
/// sources that reroute chose, and the routes of the transfers. It is the exact fractional optimum (optimum.h) for
/// these transfers; their sources and cuts do not matter.
int64_t egressBound(const ir::Layout &layout, const ir::Transfers &transfers);

/// What a cut is around, by the number that plans store; schema/plan.fbs explains each.
enum class CutKind : uint8_t {
  rank_ingress,
  shared_nic_ingress,
  node_ingress,
  node_rest_ingress,
  rank_egress,
  node_egress,
  local_copies,
  replica_node_ingress
};

/// Bytes that any plan moves over `links` links and `nics` NICs together, in one direction, or copies on `copies` ranks
/// (plan.fbs). So no plan is faster than bytes / (links * rate of a link + nics * rate of a NIC).
struct Cut {
  CutKind kind{};
  int64_t bytes = 0, links = 0, nics = 0, copies = 0;
  /// Seconds without latencies.
  double seconds(const Topology &topology) const;
};

struct LowerBounds {
  std::vector<Cut> cuts;    // the longest of each kind, by kind; none that moves nothing
  int64_t rankIngress = 0;  // the most bytes that a rank needs and does not hold
  int64_t betweenNodes = 0; // all bytes that must be sent between nodes: what a node lacks, once for each node
  /// Bytes of the busiest source mesh rank if no target forwards anything and any replica may send to any rank that
  /// does not hold the elements. (It is no bound for plans with relays.)
  int64_t egressWithoutRelays = 0;
};

/// The bounds of all plans in which a rank copies what it holds itself. They follow from three facts.
/// - Elements that a rank needs and does not hold come in over its link or its NIC, once for all params and targets of
///   the rank. Several ranks with one NIC need as much as all of them, over the links of all and the NIC. What no rank
///   of a node holds comes in once, over the NICs of the node, those of idle ranks included. A byte that some ranks of
///   the node hold comes to the others over the links of these or over the NICs of the others.
/// - Elements that some rank lacks leave one of their holders at least once, over a link or a NIC, or one of the nodes
/// of
///   their holders over its NICs, if no rank of the node lacks them. Those that some node lacks leave one of the nodes
///   that hold them, over a NIC. The minimum cut of a flow (optimum.h) finds the set of ranks or nodes that this takes
///   longest.
/// - A link has no use if no rank of its node lacks the elements or could forward them, and a NIC none if no rank of
///   another node could. A pool has other nodes, on which the other engine replicas are.
///
/// Bytes are counted in the form that is sent. Elements that a target param converts on arrival (casts, quantized
/// params) may come in the form that it stores, if that is narrower: from the sender if its format allows that
/// (docs/yaml.md, section 12: `by`), or from another rank that wants them in a converted form. Overlaps with storage
/// are omitted.
LowerBounds lowerBounds(const ir::Layout &layout, const ir::Transfers &transfers);

/// The least number of bytes that the busiest rank must read from source files or write to target files if each byte is
/// read once, by one of the ranks that need it, or written once, by one of the ranks that hold it. 0 if both sides are
/// files: then there is no choice.
int64_t storageBound(const ir::Layout &layout, const ir::Transfers &transfers);

} // namespace reshard
