// SPDX-License-Identifier: Apache-2.0
// Values that no plan can be below. The report prints them beside the plan's values.
#pragma once

#include "ir/ir.h"

namespace reshard {

/// The least number of bytes that the busiest source rank must send, given the locality rule (candidates.h) and the
/// routes that distribute chose. It is the exact fractional optimum (optimum.h) for these transfers; their sources and
/// cuts do not matter.
int64_t egressBound(const ir::Layout &layout, const ir::Transfers &transfers);

/// Lower bounds in bytes on the layout's topology, for plans with and without relays. Each is a bound for the busiest
/// rank or NIC (plan.fbs).
struct LowerBounds {
  int64_t nodes = 1;     // nodes that have source or target ranks
  int64_t rankLocal = 0; // copied from the rank's own source params
  int64_t rankIngress = 0, rankEgress = 0, rankMean = 0;
  int64_t nicIngress = 0, nicEgress = 0, nicMean = 0;
  int64_t betweenNodes = 0; // all bytes that must be sent between nodes: what a node lacks, once for each node
  /// Bytes of the busiest source mesh rank if no target forwards anything and any replica may send to any rank that
  /// does not hold the elements. (It is no bound for plans with relays.)
  int64_t egressWithoutRelays = 0;
};

/// Computes the bounds from three facts. A rank or node must receive the bytes that it needs and does not hold
/// (`…Ingress`). Such a byte must leave one of its replicas at least once: the fractional optimum over replicas
/// (`…Egress`). It is sent once for each rank (or node) that needs it: the sum of these bytes divided by the number of
/// ranks (or NICs) (`…Mean`). Overlaps with storage are omitted.
LowerBounds lowerBounds(const ir::Layout &layout, const ir::Transfers &transfers);

/// The least number of bytes that the busiest rank must read from source files or write to target files if each byte is
/// read once, by one of the ranks that need it, or written once, by one of the ranks that hold it. 0 if both sides are
/// files: then there is no choice.
int64_t storageBound(const ir::Layout &layout, const ir::Transfers &transfers);

} // namespace reshard
