// SPDX-License-Identifier: Apache-2.0
#include "compiler/transfer/exchange.h"

#include "compiler/transfer/message_size.h"

#include <algorithm>

namespace reshard {

using namespace ir;

BroadcastTree chain(const std::vector<std::vector<int32_t>> &nodes, size_t first, size_t count, size_t stripe) {
  BroadcastTree tree;
  int32_t before = -1;
  for (size_t n = 0; n < count; ++n) {
    const std::vector<int32_t> &meshRanks = nodes[(first + n) % nodes.size()];
    const int32_t entry = meshRanks[stripe % meshRanks.size()];
    if (before < 0)
      tree.root = entry;
    else
      tree.route.push_back({before, entry});
    for (int32_t meshRank : meshRanks)
      if (meshRank != entry)
        tree.route.push_back({entry, meshRank});
    before = entry;
  }
  return tree;
}

BroadcastTree broadcastTree(Exchange exchange, const std::vector<std::vector<int32_t>> &nodes, size_t node,
                            size_t rank) {
  if (exchange == Exchange::nodes)
    return chain(nodes, node, nodes.size(), rank);
  BroadcastTree tree{nodes[node][rank], {}};
  std::vector<int32_t> ring; // all mesh ranks, ascending, rotated so that the root is first
  for (const auto &meshRanks : nodes)
    ring.insert(ring.end(), meshRanks.begin(), meshRanks.end());
  std::sort(ring.begin(), ring.end());
  std::rotate(ring.begin(), std::find(ring.begin(), ring.end(), tree.root), ring.end());
  for (size_t n = 1; n < ring.size(); ++n) {
    size_t from = 0;
    if (exchange == Exchange::gather_rounds)
      from = n - 1;
    else if (exchange == Exchange::broadcast) // binomial tree: the parent of n is n without its highest bit
      for (size_t bit = 1; bit <= n; bit *= 2)
        from = n - bit;
    tree.route.push_back({ring[from], ring[n]});
  }
  return tree;
}

void ExchangeCost::add(const Endpoint &endpoint, const BroadcastTree &tree, int64_t bytes) {
  std::map<int32_t, int64_t> depth; // by mesh rank
  for (const Hop &hop : tree.route) {
    pairs_[{endpoint.ranks[hop.from], endpoint.ranks[hop.to]}] += bytes;
    hops_ = std::max(hops_, depth[hop.to] = depth[hop.from] + 1);
  }
}

int64_t ExchangeCost::time() const {
  const Topology &topology = layout_.topology;
  struct Port {
    int64_t bytes = 0;
    std::vector<int64_t> messages; // bytes, by partner
  };
  std::map<std::pair<int64_t, bool>, Port>
      ports[2]; // by link tier (inside nodes, between nodes); by rank or NIC, sends
  for (const auto &[pair, bytes] : pairs_) {
    const bool internode = topology.node(pair.first) != topology.node(pair.second);
    for (const bool sends : {true, false}) {
      const int64_t rank = sends ? pair.first : pair.second;
      Port &port = ports[internode][{internode ? topology.nic(rank) : rank, sends}];
      port.bytes += bytes;
      port.messages.push_back(bytes);
    }
  }
  int64_t slowest = 0;
  for (const bool internode : {false, true}) {
    const int64_t rate = internode ? topology.nicRate : topology.linkRate;
    const int64_t latency = internode ? topology.nicLatency : topology.linkLatency;
    auto time = [&](int64_t bytes) {
      return static_cast<int64_t>(static_cast<__int128>(bytes) * 1'000'000'000 / rate);
    };
    for (const auto &[key, port] : ports[internode]) {
      const int64_t partners = static_cast<int64_t>(port.messages.size());
      const int64_t message = bestChunkBytes(port.bytes, partners, hops_ - 1, rate, latency);
      const int64_t largest = std::min(message, *std::max_element(port.messages.begin(), port.messages.end()));
      // Each hop after the first delays the bytes by one message.
      slowest = std::max(slowest, time(port.bytes) + hops_ * latency + (hops_ - 1) * time(largest));
    }
  }
  return slowest;
}

} // namespace reshard
