// SPDX-License-Identifier: Apache-2.0
// Routes of bytes from the ranks that hold them to those that want them, chosen for all bytes together so that the link
// or NIC that is used longest is used as shortly as possible.
#pragma once

#include "base/topology.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace reshard {

/// Bytes that are sent from one rank to another: world ranks.
struct RankHop {
  int32_t from = 0, to = 0;
  bool operator==(const RankHop &) const = default;
};

/// The bytes that each link and each NIC moves in each direction. A rank sends to ranks of its node over its link, to
/// others over its NIC.
class NetworkLoad {
public:
  NetworkLoad(const Topology &topology, int64_t world);

  int64_t ranks() const { return static_cast<int64_t>(node_.size()); }
  int64_t nodes() const { return static_cast<int64_t>(ofNode_.size()); }
  int32_t node(int32_t rank) const { return node_[static_cast<size_t>(rank)]; }
  const std::vector<int32_t> &ranksOf(int32_t node) const { return ofNode_[static_cast<size_t>(node)]; }
  int64_t nicsOf(int32_t node) const { return nic_[ranksOf(node).back()] - nic_[ranksOf(node).front()] + 1; }

  // A resource is one direction of a link or of a NIC.
  size_t out(int32_t rank, bool link) const { return link ? rank : 2 * node_.size() + nic_[rank]; }
  size_t in(int32_t rank, bool link) const {
    return link ? node_.size() + rank : 2 * node_.size() + nics_ + nic_[rank];
  }
  size_t resources() const { return bytes_.size(); }
  int64_t bytes(size_t resource) const { return bytes_[resource]; }
  /// Bytes per second.
  int64_t rate(size_t resource) const { return resource < 2 * node_.size() ? topology_.linkRate : topology_.nicRate; }
  /// Picoseconds in which a resource moves its bytes.
  int64_t time(size_t resource) const { return time(bytes_[resource], rate(resource)); }
  static int64_t time(int64_t bytes, int64_t rate);
  /// Bytes that a resource moves in so many picoseconds.
  int64_t capacity(size_t resource, int64_t time) const;

  /// Adds bytes; removes them if they are negative.
  void add(const RankHop &hop, int64_t bytes);
  /// The time of the resource that is used longest.
  int64_t busiest() const;

private:
  const Topology topology_;
  std::vector<int32_t> node_, nic_; // by rank
  std::vector<std::vector<int32_t>> ofNode_;
  int64_t nics_;
  std::vector<int64_t> bytes_; // by resource
};

/// Bytes with the same holders and the same wanters: world ranks, ascending, none of them both.
struct ByteClass {
  std::vector<int32_t> holders, wanters;
  int64_t bytes = 0;
};

/// A parcel of a class, and the hops by which it reaches each wanter once. `from` of a hop is a holder, or the `to` of
/// an earlier one.
struct RoutedParcel {
  int64_t bytes = 0;
  std::vector<RankHop> hops;
};

/// Picoseconds that no routes can be faster than: a rank receives what it wants, and a node what its ranks want and
/// none of them holds.
int64_t leastRouteTime(const Topology &topology, int64_t world, const std::vector<ByteClass> &classes);

/// Divides each class into parcels and finds a tree for each. `load` has what else is sent; the hops are added to it.
///
/// Each resource has a price that grows exponentially with its use. A tree grows by the cheapest hop until it has all
/// wanters, and prices change with each hop; branches cost extra. Trees over the busiest resources are taken out and
/// built anew, several times, and then in halves: multiplicative weights, as for fractional packings of trees (Garg and
/// Koenemann, 2007). All is computed in integers, so that the result is the same on every machine.
///
/// Time: the sum over parcels and sweeps of (wanters times (nodes of the class + ranks of a node)).
std::vector<std::vector<RoutedParcel>> route(const Topology &topology, const std::vector<ByteClass> &classes,
                                             NetworkLoad &load);

} // namespace reshard
