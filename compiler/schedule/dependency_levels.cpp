// SPDX-License-Identifier: Apache-2.0
// Numbers steps in the order of their dependences.
#include "compiler/schedule/rank_steps.h"

#include "schema/step_rules.h"

#include <algorithm>
#include <cassert>
#include <numeric>
#include <utility>
#include <vector>

namespace reshard {

using namespace ir;

namespace {

/// The steps of all ranks and their order. The two ends of a message are one node.
class StepGraph {
public:
  explicit StepGraph(const Schedule &schedule) : schedule_(schedule), nodes_(schedule.messages) {
    for (const RankSchedule &rank : schedule.ranks) {
      firsts_.push_back(nodes_);
      nodes_ += static_cast<uint32_t>(rank.steps.size());
    }
  }

  uint32_t nodes() const { return nodes_; }
  uint32_t node(size_t rank, size_t number) const {
    const Step &step = schedule_.ranks[rank].steps[number];
    return step.kind == StepKind::send || step.kind == StepKind::recv ? step.message
                                                                      : firsts_[rank] + static_cast<uint32_t>(number);
  }

  /// The pairs (earlier node, later node) of which the later one must have a greater level.
  std::vector<std::pair<uint32_t, uint32_t>> edges() const {
    std::vector<std::pair<uint32_t, uint32_t>> edges;
    for (size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      const std::vector<Step> &steps = schedule_.ranks[rank].steps;
      for (size_t number = 0; number < steps.size(); ++number)
        for (const uint32_t before : steps[number].after)
          if (schema::raisesLevel(steps[before].kind, steps[number].kind))
            edges.emplace_back(node(rank, before), node(rank, number));
    }
    return edges;
  }

private:
  const Schedule &schedule_;
  std::vector<uint32_t> firsts_; // by rank: the node of its step 0; the nodes of messages have lower numbers
  uint32_t nodes_ = 0;
};

/// Topological order (A. B. Kahn, 1962).
std::vector<uint32_t> levelsOf(const StepGraph &graph) {
  const std::vector<std::pair<uint32_t, uint32_t>> edges = graph.edges();
  std::vector<size_t> firsts(graph.nodes() + 2); // by node: its first entry of `later`, those of the next node follow
  std::vector<uint32_t> left(graph.nodes());     // by node: earlier nodes whose level is not known yet
  for (const auto &[before, after] : edges) {
    ++firsts[before + 2];
    ++left[after];
  }
  std::partial_sum(firsts.begin(), firsts.end(), firsts.begin());
  std::vector<uint32_t> later(firsts.back());
  for (const auto &[before, after] : edges)
    later[firsts[before + 1]++] = after;
  std::vector<uint32_t> levels(graph.nodes()), known;
  for (uint32_t node = 0; node < graph.nodes(); ++node)
    if (left[node] == 0)
      known.push_back(node);
  for (size_t i = 0; i < known.size(); ++i)
    for (size_t entry = firsts[known[i]]; entry < firsts[known[i] + 1]; ++entry) {
      const uint32_t after = later[entry];
      levels[after] = std::max(levels[after], levels[known[i]] + 1);
      if (--left[after] == 0)
        known.push_back(after);
    }
  assert(known.size() == graph.nodes() && "steps wait for each other in a cycle");
  return levels;
}

} // namespace

uint64_t assignDependencyLevels(Schedule &schedule) {
  const StepGraph graph(schedule);
  const std::vector<uint32_t> levels = levelsOf(graph);
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank)
    for (size_t number = 0; number < schedule.ranks[rank].steps.size(); ++number)
      schedule.ranks[rank].steps[number].level = static_cast<uint16_t>(levels[graph.node(rank, number)]);
  return levels.empty() ? 0 : uint64_t{*std::max_element(levels.begin(), levels.end())} + 1;
}

} // namespace reshard
