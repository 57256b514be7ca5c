#include "executor/dependency_levels.h"

#include <algorithm>
#include <utility>

namespace reshard {

using namespace schema;

namespace {

/// The send and the receive of a message.
struct Pair {
  struct End {
    const LocalRank *rank = nullptr;
    const Step *step = nullptr;
    uint32_t number = 0; // of the step
  } send, receive;
};

std::string pairUp(const std::vector<LocalRank> &ranks, std::vector<Pair> &messages) {
  for (const LocalRank &rank : ranks)
    for (uint32_t s = 0; s < rank.segment->steps()->size(); ++s)
      if (const Step *step = rank.segment->steps()->Get(s);
          step->kind() == StepKind::send || step->kind() == StepKind::recv) {
        Pair &pair = messages[step->message()];
        Pair::End &end = step->kind() == StepKind::send ? pair.send : pair.receive;
        if (end.step)
          return "message " + std::to_string(step->message()) + " is " +
                 (step->kind() == StepKind::send ? "sent" : "received") + " twice, by rank " +
                 std::to_string(end.rank->rank) + " and by rank " + std::to_string(rank.rank);
        end = {&rank, step, s};
      }
  for (uint64_t m = 0; m < messages.size(); ++m) {
    const auto &[send, receive] = messages[m];
    if (!send.step && !receive.step)
      continue;
    if (!send.step || !receive.step) {
      const Pair::End &one = send.step ? send : receive;
      return "message " + std::to_string(m) + " of rank " + std::to_string(one.rank->rank) + " needs rank " +
             std::to_string(one.step->peer()) +
             ", which is not in this process; transport 'threads' needs all ranks of the plan in one process";
    }
    if (send.step->peer() != receive.rank->rank || receive.step->peer() != send.rank->rank ||
        send.step->round() != receive.step->round() || send.step->input_count() != receive.step->output_count())
      return "message " + std::to_string(m) + " differs between rank " + std::to_string(send.rank->rank) +
             " and rank " + std::to_string(receive.rank->rank) + ": expected equal peers, rounds and operand counts";
  }
  return {};
}

/// The dependency level of each message and each local step: one more than the greatest level of what it waits for.
/// `after` between two sends, or between two receives, orders the use of arena slots, which are not used here; a
/// receive that waits for a send overwrites bytes that the send relays. Topological order (A. B. Kahn, 1962), in time
/// linear in the plan's `after`, plus a sort.
class DependencyLevels {
public:
  DependencyLevels(const std::vector<LocalRank> &ranks, size_t messages) : ranks_(ranks) {
    size_t next = messages;
    for (const LocalRank &rank : ranks) {
      firsts_.push_back(next);
      next += rank.segment->steps()->size();
    }
    levels_.resize(next);
  }

  std::string find() {
    std::vector<std::pair<size_t, size_t>> edges; // (earlier node, later node)
    for (size_t r = 0; r < ranks_.size(); ++r)
      for (uint32_t s = 0; s < ranks_[r].segment->steps()->size(); ++s)
        addEdges(r, s, edges);
    std::sort(edges.begin(), edges.end());
    std::vector<uint32_t> left(levels_.size());
    for (const auto &[from, to] : edges)
      ++left[to];
    std::vector<size_t> ready;
    for (size_t node = 0; node < left.size(); ++node)
      if (left[node] == 0)
        ready.push_back(node);
    for (size_t i = 0; i < ready.size(); ++i)
      for (auto edge = std::lower_bound(edges.begin(), edges.end(), std::pair(ready[i], size_t{0}));
           edge != edges.end() && edge->first == ready[i]; ++edge) {
        levels_[edge->second] = std::max(levels_[edge->second], levels_[edge->first] + 1);
        if (--left[edge->second] == 0)
          ready.push_back(edge->second);
      }
    return ready.size() == left.size() ? std::string() : "steps of the ranks wait for each other in a cycle";
  }

  uint32_t of(size_t rank, uint32_t number) const { return levels_[node(rank, number)]; }

private:
  size_t node(size_t rank, uint32_t number) const {
    const Step &step = *ranks_[rank].segment->steps()->Get(number);
    return step.kind() == StepKind::send || step.kind() == StepKind::recv ? step.message() : firsts_[rank] + number;
  }

  void addEdges(size_t rank, uint32_t number, std::vector<std::pair<size_t, size_t>> &edges) const {
    const Segment &segment = *ranks_[rank].segment;
    const Step &step = *segment.steps()->Get(number);
    for (uint32_t i = 0; i < step.after_count(); ++i) {
      const uint32_t earlier = segment.after()->Get(step.first_after() + i);
      const StepKind kind = segment.steps()->Get(earlier)->kind();
      if (kind == StepKind::send ? step.kind() == StepKind::recv
                                 : kind != StepKind::recv || step.kind() != StepKind::recv)
        edges.emplace_back(node(rank, earlier), node(rank, number));
    }
  }

  const std::vector<LocalRank> &ranks_;
  std::vector<size_t> firsts_; // by rank: the node of its step 0; nodes of messages come before
  std::vector<uint32_t> levels_;
};

} // namespace

std::string forEachCopy(const Plan &plan, const std::vector<LocalRank> &ranks, const CopyVisitor &visit) {
  std::vector<Pair> messages(plan.manifest().messages());
  if (std::string error = pairUp(ranks, messages); !error.empty())
    return error;
  DependencyLevels levels(ranks, messages.size());
  if (std::string error = levels.find(); !error.empty())
    return error;
  struct Item {
    uint32_t level;
    const LocalRank *from, *to;
    const Step *input, *output;
  };
  std::vector<Item> items;
  for (size_t r = 0; r < ranks.size(); ++r)
    for (uint32_t s = 0; s < ranks[r].segment->steps()->size(); ++s) {
      const Step &step = *ranks[r].segment->steps()->Get(s);
      if (step.kind() != StepKind::send && step.kind() != StepKind::recv)
        items.push_back({levels.of(r, s), &ranks[r], &ranks[r], &step, &step});
    }
  for (const Pair &pair : messages)
    if (pair.send.step)
      items.push_back({levels.of(static_cast<size_t>(pair.send.rank - ranks.data()), pair.send.number), pair.send.rank,
                       pair.receive.rank, pair.send.step, pair.receive.step});
  std::stable_sort(items.begin(), items.end(), [](const Item &a, const Item &b) { return a.level < b.level; });
  for (const auto &[level, from, to, input, output] : items) {
    auto operand = [](const LocalRank *rank, uint32_t number) { return rank->segment->operands()->Get(number); };
    for (uint32_t i = 0; input->kind() == StepKind::reduce && i < input->input_count(); ++i)
      if (std::string error = visit(level, *from, operand(from, input->first_input() + i), *to, nullptr);
          !error.empty())
        return error;
    for (uint32_t i = 0; i < output->output_count(); ++i)
      if (std::string error =
              visit(level, *from, output->kind() == StepKind::fill ? nullptr : operand(from, input->first_input() + i),
                    *to, operand(to, output->first_output() + i));
          !error.empty())
        return error;
  }
  return {};
}

} // namespace reshard
