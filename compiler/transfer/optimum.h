// SPDX-License-Identifier: Apache-2.0
// The least possible load of the busiest sender: the goal of balance, and the bound that its result is compared with.
#pragma once

#include <cstdint>
#include <vector>

namespace reshard {

/// Bytes that `senders` may divide among themselves in any proportion.
struct SendClass {
  std::vector<int32_t> senders; // ascending, not empty
  int64_t bytes = 0;
};

struct Optimum {
  int64_t load = 0;                        // the least possible maximum over senders, in bytes for each of a capacity
  std::vector<std::vector<int64_t>> bytes; // an assignment with that maximum: by class, by index into its senders
  /// The senders that determine `load`, ascending, and the bytes that they must send: those of classes that have no
  /// other sender, and their base. It is the ceiling of the quotient of these bytes and their capacity.
  std::vector<int32_t> busiest;
  int64_t busiestBytes = 0;
};

/// The fractional optimum of assigning the bytes of every class to its senders, if sender p sends base[p] bytes
/// already and can send capacity[p] bytes while one of capacity 1 sends one; without `capacity` all are equal. It is
/// the maximum over sets H of senders of (bytes that only H can send + base of H) / capacity of H. The algorithm
/// maximizes a flow from classes to senders of capacity `load` each (Dinic). If the flow does not carry all bytes, its
/// minimum cut is a set H with a larger quotient, which is the next `load` (Newton's method on the quotient; Radzik,
/// "Fractional combinatorial optimization", 1998). Senders that occur in the same classes are one node of the flow
/// network, so that the time does not grow with the number of replicas. The result is exact; the number of steps is at
/// most the number of nodes.
Optimum optimum(const std::vector<SendClass> &classes, const std::vector<int64_t> &base,
                const std::vector<int64_t> &capacity = {});

} // namespace reshard
