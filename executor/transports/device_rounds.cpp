// SPDX-License-Identifier: Apache-2.0
// Lists the operations of a device: launches by dependency level, or rounds of packing, batches and unpacking.
#include "executor/transports/device_rounds.h"

#include "executor/memory/chunks.h"
#include "executor/memory/packing.h"
#include "executor/memory/view_jobs.h"
#include "executor/transports/dependency_levels.h"

#include <algorithm>
#include <map>

namespace reshard {

using namespace schema;

namespace {

/// One chunk of a message in a round.
struct Chunk {
  const Packing *packing;
  uint64_t at; // first byte, of its message
  bool staged;
  P2pOp op;
};

struct Round {
  std::vector<Chunk> chunks;
  int64_t needs = -1; // the latest round whose receives its sends forward; -1: none
};

void append(std::vector<Operation> &operations, Tables tables) {
  if (!tables.empty())
    operations.emplace_back(std::in_place_type<Tables>, std::move(tables));
}

void addViewJobs(const std::vector<LocalRank> &ranks, ViewJobs::JobSet set, std::vector<Operation> &operations) {
  Tables tables;
  for (const LocalRank &rank : ranks)
    if (rank.viewJobs)
      rank.viewJobs->tabulate(set, tables);
  append(operations, std::move(tables));
}

/// Adds the packs, or the unpacks, of a round to tables.
Status launch(const Round &round, bool packs, SplitBlocks &splitBlocks, Tables &tables) {
  for (const auto &[packing, at, staged, op] : round.chunks) {
    if (!staged || op.send != packs)
      continue;
    const Packing::PackedRange range{at, at + op.bytes, op.memory};
    if (Status status = packs ? packing->pack(range, splitBlocks, tables) : packing->unpack(range, splitBlocks, tables);
        !status.ok())
      return status;
  }
  return {};
}

/// Whether the staging that a round packs, or unpacks, overlaps memory that another round sends (`sends`) or receives
/// (`receives`).
bool clash(const Round &round, bool packs, const Round &other, bool sends, bool receives) {
  for (const Chunk &mine : round.chunks)
    for (const Chunk &theirs : other.chunks)
      if (mine.staged && mine.op.send == packs && (theirs.op.send ? sends : receives) &&
          mine.op.memory < theirs.op.memory + theirs.op.bytes && theirs.op.memory < mine.op.memory + mine.op.bytes)
        return true;
  return false;
}

/// A rank's local steps, by (number of rounds that must be unpacked before, dependency level).
using LocalSteps = std::map<std::pair<int64_t, uint32_t>, Tables>;

bool hasLocalSteps(const LocalSteps &localSteps, int64_t number) {
  const auto at = localSteps.lower_bound({number, 0});
  return at != localSteps.end() && at->first.first == number;
}

/// Moves the local steps that run after `number` rounds to the operations.
void appendLocalSteps(LocalSteps &localSteps, int64_t number, std::vector<Operation> &operations) {
  for (; hasLocalSteps(localSteps, number); localSteps.erase(localSteps.lower_bound({number, 0})))
    append(operations, std::move(localSteps.lower_bound({number, 0})->second));
}

Status addExchanges(const std::vector<Round> &rounds, SplitBlocks &splitBlocks, LocalSteps &localSteps,
                    std::vector<Operation> &operations) {
  Status status;
  auto launchNow = [&](const Round &round, bool packs) {
    Tables tables;
    if (status.ok())
      status = launch(round, packs, splitBlocks, tables);
    append(operations, std::move(tables));
  };
  bool packed = false; // this round, beside the batch of the round before
  for (size_t k = 0; k < rounds.size() && status.ok(); ++k) {
    const Round &round = rounds[k], *before = k > 0 ? &rounds[k - 1] : nullptr,
                *next = k + 1 < rounds.size() ? &rounds[k + 1] : nullptr;
    const auto number = static_cast<int64_t>(k);
    const bool unpackFirst =
        before && (hasLocalSteps(localSteps, number) || round.needs >= number - 1 ||
                   (next && next->needs >= number - 1) || clash(*before, false, round, true, true));
    if (unpackFirst)
      launchNow(*before, false);
    appendLocalSteps(localSteps, number, operations);
    if (!packed)
      launchNow(round, true);
    auto &batch = std::get<P2pBatch>(operations.emplace_back(std::in_place_type<P2pBatch>));
    if (before && !unpackFirst && status.ok())
      status = launch(*before, false, splitBlocks, batch.concurrent);
    packed = next && next->needs < number && !clash(*next, true, round, true, true) &&
             !(before && clash(*next, true, *before, false, true));
    if (packed && status.ok())
      status = launch(*next, true, splitBlocks, batch.concurrent);
    for (const Chunk &chunk : round.chunks)
      batch.ops.push_back(chunk.op);
  }
  if (!rounds.empty())
    launchNow(rounds.back(), false);
  appendLocalSteps(localSteps, static_cast<int64_t>(rounds.size()), operations);
  return status;
}

/// Adds operands [first, first + count) of a rank to a packing.
Status addOperands(const LocalRank &rank, uint32_t first, uint32_t count, Packing &packing) {
  for (uint32_t i = 0; i < count; ++i)
    if (Status status = packing.add(rank, *rank.segment->operands()->Get(first + i)); !status.ok())
      return status;
  return {};
}

/// A rank's messages to itself.
struct SelfMessages {
  Packing out, in;
};

/// Makes rounds of the local copies that wait for nothing, if `staging` has memory for messages to itself.
Status addSelf(const LocalRank &rank, const Staging &staging, SelfMessages &self, std::vector<Round> &rounds) {
  for (const Step *step : *rank.segment->steps())
    if (staging.self && step->kind() == StepKind::copy && step->after_count() == 0) {
      if (Status status = addOperands(rank, step->first_input(), step->input_count(), self.out); !status.ok())
        return status;
      if (Status status = addOperands(rank, step->first_output(), step->output_count(), self.in); !status.ok())
        return status;
    }
  for (uint64_t at = 0, chunk = 0; at < self.out.bytes(); at += staging.selfBytes, ++chunk) {
    const uint64_t bytes = std::min(self.out.bytes() - at, staging.selfBytes),
                   chunks = (self.out.bytes() + staging.selfBytes - 1) / staging.selfBytes;
    std::byte *const sent = staging.self + chunk % 2 * staging.selfBytes, *const received =
                                                                              sent + 2 * staging.selfBytes;
    rounds.push_back({{{&self.out, at, true, {true, rank.rank, sent, bytes, 0, 0, chunk, chunks}},
                       {&self.in, at, true, {false, rank.rank, received, bytes, 0, 0, chunk, chunks}}},
                      -1});
  }
  return {};
}

/// Adds all other local steps. `unpacked`: by step, the number of rounds that must be unpacked before its bytes are
/// there; given for receives, set here for local steps. The plan cannot have these numbers: a rank's batches also carry
/// its messages to itself, whose size is the transport's.
Status addLocalSteps(const LocalRank &rank, bool self, int64_t selfRounds, std::vector<int64_t> &unpacked,
                     LocalSteps &localSteps) {
  const Segment &segment = *rank.segment;
  for (uint32_t s = 0; s < segment.steps()->size(); ++s) {
    const Step &step = *segment.steps()->Get(s);
    if (step.kind() == StepKind::send || step.kind() == StepKind::recv)
      continue;
    if (self && step.kind() == StepKind::copy && step.after_count() == 0) {
      unpacked[s] = selfRounds;
      continue;
    }
    for (uint32_t i = 0; i < step.after_count(); ++i) {
      const uint32_t earlier = segment.after()->Get(step.first_after() + i);
      if (segment.steps()->Get(earlier)->kind() != StepKind::send) // a send writes nothing that a local step reads
        unpacked[s] = std::max(unpacked[s], unpacked[earlier]);
    }
    Tables &tables = localSteps[{unpacked[s], step.level()}];
    auto operand = [&](uint32_t at) { return segment.operands()->Get(at); };
    for (uint32_t i = 0; step.kind() == StepKind::reduce && i < step.input_count(); ++i)
      rank.viewJobs->reduce(operand(step.first_input() + i)->buffer(), tables);
    for (uint32_t i = 0; i < step.output_count(); ++i)
      if (Status status = addCopy({&rank, step.kind() == StepKind::copy ? operand(step.first_input() + i) : nullptr},
                                  {&rank, operand(step.first_output() + i)}, tables);
          !status.ok())
        return status;
  }
  return {};
}

bool shareArena(const Step &a, const Step &b) {
  auto end = [](const Step &step) { return step.staging() + (step.chunk() > 0 ? 2 * step.chunk() : step.bytes()); };
  return a.staging() != UINT64_MAX && b.staging() != UINT64_MAX && a.staging() < end(b) && b.staging() < end(a);
}

/// A send or a receive.
struct MessageChunks {
  const Step *step;
  uint32_t number; // the step's
  Packing packing;
  /// By chunk: one more than the latest round whose receives it needs; 0: none.
  std::vector<uint64_t> needs;
};

Status tooLate(const LocalRank &rank, uint32_t number, uint64_t chunk, uint32_t other) {
  return failed("step " + std::to_string(number) + " of rank " + std::to_string(rank.rank) + " needs step " +
                std::to_string(other) + " before its chunk " + std::to_string(chunk) +
                ", expected that step to be in an earlier round");
}

/// Finds the rounds of other messages that the chunks of a step need. Fails if these are not earlier rounds.
Status findNeeds(const LocalRank &rank, uint32_t number, MessageChunks &message) {
  const Step &step = *message.step;
  const bool send = step.kind() == StepKind::send;
  const std::vector<std::vector<uint64_t>> before =
      send ? chunksBefore(*rank.segment, step) : std::vector<std::vector<uint64_t>>();
  message.needs.resize(chunkCount(step));
  for (uint32_t i = 0; i < step.after_count(); ++i) {
    const uint32_t other = rank.segment->after()->Get(step.first_after() + i);
    const Step &earlier = *rank.segment->steps()->Get(other);
    if (earlier.kind() != StepKind::send && earlier.kind() != StepKind::recv)
      continue; // see findLocalNeeds
    const bool passesOn = send && earlier.kind() == StepKind::recv && !shareArena(step, earlier);
    for (uint64_t c = 0; c < chunkCount(step); ++c) {
      const uint64_t needed = passesOn ? before[i][c] : chunkCount(earlier);
      if (needed > 0 && earlier.round() + needed - 1 >= step.round() + c)
        return tooLate(rank, number, c, other);
      if (needed > 0 && send && earlier.kind() == StepKind::recv)
        message.needs[c] = std::max(message.needs[c], earlier.round() + needed);
    }
  }
  return {};
}

/// Adds to `round`, the one of a message's first chunk and by number `number`, the rounds that local steps in the
/// message's `after` need. Fails if such a step runs later.
Status findLocalNeeds(const LocalRank &rank, uint32_t message, const std::vector<int64_t> &unpacked, int64_t number,
                      Round &round) {
  const Step &step = *rank.segment->steps()->Get(message);
  for (uint32_t i = 0; i < step.after_count(); ++i) {
    const uint32_t other = rank.segment->after()->Get(step.first_after() + i);
    const StepKind kind = rank.segment->steps()->Get(other)->kind();
    if (kind == StepKind::send || kind == StepKind::recv)
      continue;
    if (unpacked[other] > number)
      return tooLate(rank, message, 0, other);
    round.needs = std::max(round.needs, unpacked[other] - 1);
  }
  return {};
}

/// The sends and receives of a rank, by message number: sends and receives of a pair of ranks match by their order in a
/// batch.
Status findMessages(const LocalRank &rank, std::vector<MessageChunks> &messages) {
  for (uint32_t s = 0; s < rank.segment->steps()->size(); ++s) {
    const Step &step = *rank.segment->steps()->Get(s);
    const bool send = step.kind() == StepKind::send;
    if (!send && step.kind() != StepKind::recv)
      continue;
    MessageChunks &message = messages.emplace_back(MessageChunks{&step, s, {}, {}});
    if (Status status = send ? addOperands(rank, step.first_input(), step.input_count(), message.packing)
                             : addOperands(rank, step.first_output(), step.output_count(), message.packing);
        !status.ok())
      return status;
    if (step.staging() == UINT64_MAX && !message.packing.contiguous())
      return failed("step " + std::to_string(s) + " sends or receives in place, but its bytes are not contiguous");
    if (Status status = findNeeds(rank, s, message); !status.ok())
      return status;
  }
  std::stable_sort(messages.begin(), messages.end(), [](const MessageChunks &a, const MessageChunks &b) {
    return a.step->message() < b.step->message();
  });
  return {};
}

/// The rounds of the plan in which a rank has chunks of messages. They follow its rounds of messages to itself.
class PlanRounds {
public:
  /// `selfRounds`: the number of rounds of messages to itself.
  PlanRounds(const LocalRank &rank, const std::vector<MessageChunks> &messages, int64_t selfRounds)
      : rank_(rank), selfRounds_(selfRounds) {
    for (const MessageChunks &message : messages)
      for (uint64_t chunk = 0; chunk < chunkCount(*message.step); ++chunk)
        chunks_[message.step->round() + chunk].emplace_back(&message, chunk);
    for (const auto &[planRound, chunks] : chunks_)
      numbers_.emplace(planRound, selfRounds + static_cast<int64_t>(numbers_.size()));
  }

  /// By step: for receives, the number of rounds that must be unpacked before their bytes have arrived; 0 for others.
  std::vector<int64_t> unpacked() const {
    std::vector<int64_t> result(rank_.segment->steps()->size());
    for (const auto &[planRound, chunks] : chunks_)
      for (const auto &[message, chunk] : chunks)
        result[message->number] = message->step->kind() == StepKind::recv ? numbers_.at(planRound) + 1 : 0;
    return result;
  }

  /// Appends these rounds. `unpacked` is that of all steps (addLocalSteps).
  Status append(const Staging &staging, const std::vector<int64_t> &unpacked, std::vector<Round> &rounds) const {
    for (const auto &[planRound, chunks] : chunks_) {
      Round &round = rounds.emplace_back();
      round.needs = selfRounds_ - 1;
      for (const auto &[message, chunk] : chunks) {
        round.chunks.push_back(chunkOf(*message, chunk, staging));
        if (message->needs[chunk] > 0)
          round.needs = std::max(round.needs, numbers_.at(message->needs[chunk] - 1));
        if (chunk == 0)
          if (Status status = findLocalNeeds(rank_, message->number, unpacked, numbers_.at(planRound), round);
              !status.ok())
            return status;
      }
    }
    return {};
  }

private:
  Chunk chunkOf(const MessageChunks &message, uint64_t chunk, const Staging &staging) const {
    const Step &step = *message.step;
    const bool staged = step.staging() != UINT64_MAX;
    const uint64_t at = chunk * step.chunk(), head = rank_.viewJobs ? rank_.viewJobs->headBytes() : 0;
    std::byte *memory = staged ? staging.arena + (chunkStaging(step, chunk) - head) : message.packing.contiguous() + at;
    return {&message.packing,
            at,
            staged,
            {.send = step.kind() == StepKind::send,
             .peer = step.peer(),
             .memory = memory,
             .bytes = chunkBytes(step, chunk),
             .message = step.message(),
             .round = step.round(),
             .chunk = chunk,
             .chunks = chunkCount(step)}};
  }

  const LocalRank &rank_;
  const int64_t selfRounds_;
  /// Round of the plan -> (message, chunk).
  std::map<uint64_t, std::vector<std::pair<const MessageChunks *, uint64_t>>> chunks_;
  std::map<uint64_t, int64_t> numbers_; // round of the plan -> number of the round on this rank
};

} // namespace

Status addDependencyLevels(const Plan &plan, const std::vector<LocalRank> &ranks, std::vector<Operation> &operations,
                           uint64_t &bytes) {
  std::vector<Tables> levels;
  Status status = forEachCopy(
      plan, ranks,
      [&](uint32_t level, const LocalRank &from, const Operand *input, const LocalRank &to, const Operand *output) {
        levels.resize(std::max<size_t>(levels.size(), level + 1));
        if (output)
          return addCopy({&from, input}, {&to, output}, levels[level]);
        to.viewJobs->reduce(input->buffer(), levels[level]);
        return Status();
      });
  addViewJobs(ranks, ViewJobs::kBefore, operations);
  for (Tables &level : levels) {
    bytes += level.bytes();
    append(operations, std::move(level));
  }
  addViewJobs(ranks, ViewJobs::kAfter, operations);
  return status;
}

uint64_t selfChunk(const LocalRank &rank, uint64_t most) {
  uint64_t bytes = 0;
  for (const Step *step : *rank.segment->steps())
    bytes += step->kind() == StepKind::copy && step->after_count() == 0 ? step->bytes() : 0;
  return (std::min(bytes, most) + 255) / 256 * 256;
}

uint64_t splitBlockCount(const LocalRank &rank, uint64_t selfBytes) {
  uint64_t blocks = 0;
  for (const Step *step : *rank.segment->steps())
    if (step->kind() == StepKind::send || step->kind() == StepKind::recv)
      blocks += chunkCount(*step) - 1;
    else if (step->kind() == StepKind::copy && selfBytes > 0)
      blocks += 2 * (step->bytes() / selfBytes + 1); // one packing and one unpacking has all of these copies
  return rank.forms.empty() ? 0 : blocks;
}

Status addRounds(const LocalRank &rank, const Staging &staging, std::vector<Operation> &operations, uint64_t &bytes) {
  SelfMessages self;
  std::vector<Round> rounds;
  if (Status status = addSelf(rank, staging, self, rounds); !status.ok())
    return status;
  const auto local = static_cast<int64_t>(rounds.size());
  std::vector<MessageChunks> messages;
  if (Status status = findMessages(rank, messages); !status.ok())
    return status;
  for (const Step *step : *rank.segment->steps())
    bytes += step->kind() == StepKind::send ? 0 : step->bytes();
  const PlanRounds planRounds(rank, messages, local);
  std::vector<int64_t> unpacked = planRounds.unpacked();
  LocalSteps localSteps;
  if (Status status = addLocalSteps(rank, staging.self, local, unpacked, localSteps); !status.ok())
    return status;
  if (Status status = planRounds.append(staging, unpacked, rounds); !status.ok())
    return status;
  SplitBlocks splitBlocks(staging.splitBlocks, staging.splitBlockCount);
  addViewJobs({rank}, ViewJobs::kBefore, operations);
  Status status = addExchanges(rounds, splitBlocks, localSteps, operations);
  addViewJobs({rank}, ViewJobs::kAfter, operations);
  return status;
}

} // namespace reshard
