// SPDX-License-Identifier: Apache-2.0
// Reads a topology: ranks per node, and rates and latencies of links, NICs and local copies.

#include "base/yaml/topology.h"

#include "base/yaml/fields.h"

namespace reshard {

namespace {

constexpr int64_t kMaxRate = 1'000'000'000'000'000; // bytes per second
constexpr int64_t kMaxLatency = 1'000'000'000;      // nanoseconds

struct Suffix {
  const char *text;
  int64_t numerator, denominator; // value in the unit of Topology = number * numerator / denominator
};

/// A kind of value: its description in errors, its suffixes, and its largest value.
struct Quantity {
  const char *wanted;
  std::vector<Suffix> suffixes;
  int64_t most;
};

/// Reads an integer with one of the suffixes. Anything else is an error and gives nullopt.
std::optional<int64_t> readQuantity(const Node &node, const std::string &what, const Quantity &quantity,
                                    Diagnostics &diagnostics) {
  if (node.kind == Node::Kind::scalar)
    for (const Suffix &suffix : quantity.suffixes) {
      if (!node.text.ends_with(suffix.text))
        continue;
      Node digits = node;
      digits.quoted = false;
      digits.text.resize(node.text.size() - std::string_view(suffix.text).size());
      digits.text.resize(digits.text.find_last_not_of(' ') + 1);
      Diagnostics unused;
      const auto count = readInteger(digits, what, 1, quantity.most / suffix.numerator * suffix.denominator, unused);
      if (!count)
        break;
      return std::max<int64_t>(1, *count * suffix.numerator / suffix.denominator);
    }
  refuse(node, quantity.wanted, what, diagnostics);
  return std::nullopt;
}

int64_t readRate(const Node &node, const std::string &what, int64_t fallback, Diagnostics &diagnostics) {
  static const Quantity kRate{
      .wanted = "a rate per direction (an integer with MB/s or GB/s for bytes, Mb/s or Gb/s for bits)",
      .suffixes = {{"MB/s", 1'000'000, 1},
                   {"GB/s", 1'000'000'000, 1},
                   {"Mb/s", 1'000'000, 8},
                   {"Gb/s", 1'000'000'000, 8}},
      .most = kMaxRate};
  return readQuantity(node, what, kRate, diagnostics).value_or(fallback);
}

int64_t readLatency(const Node &node, const std::string &what, int64_t fallback, Diagnostics &diagnostics) {
  static const Quantity kLatency{.wanted = "a time (an integer with ns, us or ms)",
                                 .suffixes = {{"ns", 1, 1}, {"us", 1'000, 1}, {"ms", 1'000'000, 1}},
                                 .most = kMaxLatency};
  return readQuantity(node, what, kLatency, diagnostics).value_or(fallback);
}

/// The keys that a link and a NIC have in common.
void readPort(Fields &fields, int64_t &rate, int64_t &latency, Diagnostics &diagnostics) {
  if (const Node *node = fields.require("rate"))
    rate = readRate(*node, "'rate'", rate, diagnostics);
  if (const Node *node = fields.find("latency"))
    latency = readLatency(*node, "'latency'", latency, diagnostics);
  fields.finish();
}

} // namespace

std::optional<Topology> readTopology(const Node &node, Diagnostics &diagnostics) {
  const size_t errorsBefore = diagnostics.errors();
  Topology topology;
  Fields fields(node, "'topology'", diagnostics);
  if (!fields.isMap())
    return std::nullopt;
  if (const Node *ranks = fields.require("ranks_per_node"))
    topology.ranksPerNode = readInteger(*ranks, "'ranks_per_node'", 1, kMaxWorld, diagnostics).value_or(1);
  if (const Node *link = fields.find("link"); link && checkMap(*link, "'link'", diagnostics)) {
    Fields inner(*link, "'link'", diagnostics);
    readPort(inner, topology.linkRate, topology.linkLatency, diagnostics);
  }
  if (const Node *nics = fields.find("nics"); nics && checkMap(*nics, "'nics'", diagnostics)) {
    Fields inner(*nics, "'nics'", diagnostics);
    if (const Node *count = inner.require("per_node")) {
      topology.nicsPerNode = readInteger(*count, "'per_node'", 1, kMaxWorld, diagnostics).value_or(0);
      if (topology.nicsPerNode > topology.ranksPerNode && topology.ranksPerNode > 0)
        diagnostics.error(count->at, "'per_node' is " + std::to_string(topology.nicsPerNode) + ", expected at most " +
                                         std::to_string(topology.ranksPerNode) +
                                         " ('ranks_per_node'), because a rank uses one NIC");
    }
    readPort(inner, topology.nicRate, topology.nicLatency, diagnostics);
  }
  if (const Node *copy = fields.find("copy"); copy && checkMap(*copy, "'copy'", diagnostics)) {
    Fields inner(*copy, "'copy'", diagnostics);
    if (const Node *rate = inner.require("rate"))
      topology.copyRate = readRate(*rate, "'rate'", topology.copyRate, diagnostics);
    inner.finish();
  }
  fields.finish();
  if (diagnostics.errors() > errorsBefore)
    return std::nullopt;
  return topology;
}

std::optional<Topology> readTopologyFile(const std::string &path, Diagnostics &diagnostics) {
  const size_t errorsBefore = diagnostics.errors();
  const auto file = readFile(path, {}, diagnostics);
  const auto root = file ? parseYaml(*file, diagnostics) : nullptr;
  if (!root || !checkMap(*root, "'topology'", diagnostics))
    return std::nullopt;
  std::optional<Topology> topology = readTopology(*root, diagnostics);
  return diagnostics.errors() > errorsBefore ? std::nullopt : topology; // parseYaml returns a tree after some errors
}

} // namespace reshard
