#include "executor/waves.h"

#include <algorithm>
#include <numeric>

namespace reshard {

using namespace schema;

namespace {

/// The two ends of a message.
struct Pair {
  struct End {
    const LocalRank *rank = nullptr;
    const Step *step = nullptr;
  } send, receive;
};

std::string pairUp(const std::vector<LocalRank> &ranks, std::vector<Pair> &messages) {
  for (const LocalRank &rank : ranks)
    for (const Step *step : *rank.segment->steps())
      if (step->kind() == StepKind::send || step->kind() == StepKind::recv) {
        Pair &pair = messages[step->message()];
        Pair::End &end = step->kind() == StepKind::send ? pair.send : pair.receive;
        if (end.step)
          return "message " + std::to_string(step->message()) + " has two ends of one kind";
        end = {&rank, step};
      }
  for (uint64_t m = 0; m < messages.size(); ++m) {
    const auto &[send, receive] = messages[m];
    if (!send.step && !receive.step)
      continue;
    if (!send.step || !receive.step) {
      const Pair::End &one = send.step ? send : receive;
      return "message " + std::to_string(m) + " of rank " + std::to_string(one.rank->rank) + " needs rank " +
             std::to_string(one.step->peer()) + ", which is not in this process; transport 'threads' needs all ranks of the plan";
    }
    if (send.step->peer() != receive.rank->rank || receive.step->peer() != send.rank->rank || send.step->round() != receive.step->round() ||
        send.step->input_count() != receive.step->output_count())
      return "message " + std::to_string(m) + " differs between rank " + std::to_string(send.rank->rank) + " and rank " +
             std::to_string(receive.rank->rank);
  }
  return {};
}

bool readsSource(const Plan &plan, const LocalRank &rank, const Operand &operand) {
  const auto *runs = rank.segment->buffers();
  auto run = std::upper_bound(runs->begin(), runs->end(), operand.buffer(),
                              [](uint32_t buffer, const BufferRun *r) { return buffer < r->first(); });
  return run != runs->begin() && (*--run)->endpoint() == 0 && plan.manifest().endpoints()->size() > 0;
}

/// How many messages must come one after the other before each: a send that reads a target comes after the receives that it waits
/// for. A rank's steps are in the order of rounds and `after` names earlier ones, so one look at all steps by round is enough.
std::string findWaves(const Plan &plan, const std::vector<LocalRank> &ranks, std::vector<uint32_t> &waves) {
  struct At {
    uint32_t round;
    const LocalRank *rank;
    const Step *step;
  };
  std::vector<At> relays;
  for (const LocalRank &rank : ranks)
    for (const Step *step : *rank.segment->steps())
      if (step->kind() == StepKind::send)
        for (uint32_t i = 0; i < step->input_count(); ++i)
          if (!readsSource(plan, rank, *rank.segment->operands()->Get(step->first_input() + i))) {
            relays.push_back({step->round(), &rank, step});
            break;
          }
  std::stable_sort(relays.begin(), relays.end(), [](const At &a, const At &b) { return a.round < b.round; });
  for (const auto &[round, rank, step] : relays)
    for (uint32_t i = 0; i < step->after_count(); ++i) {
      const Step &before = *rank->segment->steps()->Get(rank->segment->after()->Get(step->first_after() + i));
      if (before.kind() == StepKind::copy)
        waves[step->message()] = std::max(waves[step->message()], 1u);
      if (before.kind() != StepKind::recv)
        continue;
      if (before.round() >= round)
        return "rank " + std::to_string(rank->rank) + " passes on in round " + std::to_string(round) + " what it gets in that round";
      waves[step->message()] = std::max(waves[step->message()], waves[before.message()] + 1);
    }
  return {};
}

} // namespace

std::string forEachCopy(const Plan &plan, const std::vector<LocalRank> &ranks,
                        const std::function<std::string(uint32_t wave, const LocalRank &from, const Operand *input, const LocalRank &to, const Operand &output)> &visit) {
  std::vector<Pair> messages(plan.manifest().messages());
  if (std::string error = pairUp(ranks, messages); !error.empty())
    return error;
  std::vector<uint32_t> waves(messages.size());
  if (std::string error = findWaves(plan, ranks, waves); !error.empty())
    return error;
  for (const LocalRank &rank : ranks)
    for (const Step *step : *rank.segment->steps())
      if (step->kind() == StepKind::copy || step->kind() == StepKind::fill)
        for (uint32_t i = 0; i < step->output_count(); ++i)
          if (std::string error = visit(0, rank, step->kind() == StepKind::copy ? rank.segment->operands()->Get(step->first_input() + i) : nullptr, rank,
                                        *rank.segment->operands()->Get(step->first_output() + i));
              !error.empty())
            return error;
  std::vector<uint64_t> order(messages.size());
  std::iota(order.begin(), order.end(), uint64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](uint64_t a, uint64_t b) { return waves[a] < waves[b]; });
  for (uint64_t m : order)
    if (const auto &[send, receive] = messages[m]; send.step)
      for (uint32_t i = 0; i < send.step->input_count(); ++i)
        if (std::string error = visit(waves[m], *send.rank, send.rank->segment->operands()->Get(send.step->first_input() + i), *receive.rank,
                                      *receive.rank->segment->operands()->Get(receive.step->first_output() + i));
            !error.empty())
          return error;
  return {};
}

} // namespace reshard
