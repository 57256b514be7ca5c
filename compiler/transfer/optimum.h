// The least load of the busiest sender: what balance aims at, and the certificate it is judged by.
#pragma once

#include <cstdint>
#include <vector>

namespace reshard {

/// Bytes that any of `senders` may send, in any proportion.
struct SendClass {
  std::vector<int32_t> senders; // ascending, not empty
  int64_t bytes = 0;
};

struct Optimum {
  int64_t load = 0;                        // the least possible maximum over senders, in whole bytes
  std::vector<std::vector<int64_t>> bytes; // by class, by index into its senders: an assignment that reaches it
};

/// The fractional optimum of giving every class's bytes to its senders where sender p sends base[p] bytes already: the
/// largest over sets H of senders of (bytes that H alone can send + base of H) / |H|. A flow classes -> senders of
/// capacity `load` is maximised (Dinic); where it does not carry all, its minimum cut is a set H with a larger
/// quotient, which is tried next (Newton's method on the quotient; Radzik, "Fractional combinatorial optimization",
/// 1998). Places that occur in the same classes are one node of the flow, so that replicas cost nothing. Exact; at most
/// one step for each node.
Optimum optimum(const std::vector<SendClass> &classes, const std::vector<int64_t> &base);

} // namespace reshard
