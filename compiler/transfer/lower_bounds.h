// What no plan can beat: lower bounds that the report prints beside what was reached.
#pragma once

#include "ir/ir.h"

namespace reshard {

/// The least that the busiest source rank must send, in bytes, by the locality rule: a rank that holds a piece itself
/// takes its own, one whose node holds it, its node's; and targets pass on what distribute says. The exact fractional
/// optimum (optimum.h) for the transfers as they are, whose sources, and cuts, do not matter.
int64_t egressBound(const ir::Layout &layout, const ir::Transfers &transfers);

/// What no plan can beat on nodes of the layout's topology, relays or not, in bytes. Each is the largest of a rank or a
/// NIC (plan.fbs).
struct LowerBounds {
  int64_t nodes = 1; // that have source or target ranks
  int64_t rankLocal = 0, rankIngress = 0, rankEgress = 0, rankMean = 0;
  int64_t nicIngress = 0, nicEgress = 0, nicMean = 0;
  int64_t betweenNodes = 0; // all bytes that must go between nodes: what a node lacks, once
  /// Of the busiest source place, where no target passes anything on, but any holder may serve any rank that does not
  /// hold a piece. (No bound for plans with relays.)
  int64_t egressWithoutRelays = 0;
};

/// A byte that somebody needs and has not must leave one of its holders at least once: the fractional optimum over
/// holders. All such bytes, once for each that needs them, leave somebody: their sum over all that send or receive.
/// Storage has no floor here.
LowerBounds lowerBounds(const ir::Layout &layout, const ir::Transfers &transfers);

/// The least that the busiest rank must read of a source's files, or write of a target's, where each byte is read or
/// written once, by one of the ranks that want it, or have it. Where both sides are files there is no choice: 0.
int64_t storageBound(const ir::Layout &layout, const ir::Transfers &transfers);

} // namespace reshard
