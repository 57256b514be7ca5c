#include "compiler/exchange.h"

#include "compiler/message_size.h"

#include <algorithm>

namespace reshard {

using namespace ir;

Way chain(const std::vector<std::vector<int32_t>> &nodes, size_t first, size_t count, size_t stripe) {
  Way way;
  int32_t before = -1;
  for (size_t n = 0; n < count; ++n) {
    const std::vector<int32_t> &places = nodes[(first + n) % nodes.size()];
    const int32_t entry = places[stripe % places.size()];
    if (before < 0)
      way.head = entry;
    else
      way.route.push_back({before, entry});
    for (int32_t place : places)
      if (place != entry)
        way.route.push_back({entry, place});
    before = entry;
  }
  return way;
}

Way wayOf(Exchange exchange, const std::vector<std::vector<int32_t>> &nodes, size_t node, size_t rank) {
  if (exchange == Exchange::nodes)
    return chain(nodes, node, nodes.size(), rank);
  Way way{nodes[node][rank], {}};
  std::vector<int32_t> ring; // from the reader on
  for (const auto &places : nodes)
    ring.insert(ring.end(), places.begin(), places.end());
  std::sort(ring.begin(), ring.end());
  std::rotate(ring.begin(), std::find(ring.begin(), ring.end(), way.head), ring.end());
  for (size_t n = 1; n < ring.size(); ++n) {
    size_t from = 0;
    if (exchange == Exchange::gather_rounds)
      from = n - 1;
    else if (exchange == Exchange::broadcast) // n without its highest bit
      for (size_t bit = 1; bit <= n; bit *= 2)
        from = n - bit;
    way.route.push_back({ring[from], ring[n]});
  }
  return way;
}

void ExchangeCost::add(const Endpoint &endpoint, const Way &way, int64_t bytes) {
  std::map<int32_t, int64_t> depth; // by place
  for (const Hop &hop : way.route) {
    pairs_[{endpoint.ranks[hop.from], endpoint.ranks[hop.to]}] += bytes;
    hops_ = std::max(hops_, depth[hop.to] = depth[hop.from] + 1);
  }
}

int64_t ExchangeCost::time() const {
  const Topology &topology = layout_.topology;
  struct Port {
    int64_t bytes = 0;
    std::vector<int64_t> messages; // bytes for each partner
  };
  std::map<std::pair<int64_t, bool>, Port> ports[2]; // inside nodes, between them; by rank or NIC, and direction
  for (const auto &[pair, bytes] : pairs_) {
    const bool far = topology.node(pair.first) != topology.node(pair.second);
    for (const bool sends : {true, false}) {
      const int64_t rank = sends ? pair.first : pair.second;
      Port &port = ports[far][{far ? topology.nic(rank) : rank, sends}];
      port.bytes += bytes;
      port.messages.push_back(bytes);
    }
  }
  int64_t slowest = 0;
  for (const bool far : {false, true}) {
    const int64_t rate = far ? topology.nicRate : topology.linkRate;
    const int64_t latency = far ? topology.nicLatency : topology.linkLatency;
    auto time = [&](int64_t bytes) {
      return static_cast<int64_t>(static_cast<__int128>(bytes) * 1'000'000'000 / rate);
    };
    for (const auto &[key, port] : ports[far]) {
      const int64_t partners = static_cast<int64_t>(port.messages.size());
      const int64_t message = bestMessage(port.bytes, partners, hops_ - 1, rate, latency);
      const int64_t largest = std::min(message, *std::max_element(port.messages.begin(), port.messages.end()));
      // What comes over several hops is a message later with each.
      slowest = std::max(slowest, time(port.bytes) + hops_ * latency + (hops_ - 1) * time(largest));
    }
  }
  return slowest;
}

} // namespace reshard
