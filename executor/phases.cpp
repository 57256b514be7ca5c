#include "executor/phases.h"

#include "executor/chunks.h"
#include "executor/packing.h"
#include "executor/waves.h"

#include <algorithm>
#include <map>

namespace reshard {

using namespace schema;

namespace {

/// A message's chunk in a phase.
struct Chunk {
  const Packing *packing;
  uint64_t at; // in bytes of its message
  bool staged;
  Transfer transfer;
};

struct Phase {
  std::vector<Chunk> chunks;
  int64_t needs = -1; // the latest phase whose receives its sends pass on
};

void append(std::vector<Operation> &operations, kernels::Table copies) {
  if (!copies.empty())
    operations.emplace_back(std::in_place_type<kernels::Table>, std::move(copies));
}

/// What a phase packs or unpacks.
void launch(const Phase &phase, bool packs, kernels::Table &table) {
  for (const auto &[packing, at, staged, transfer] : phase.chunks)
    if (staged && transfer.send && packs)
      packing->pack(at, at + transfer.bytes, transfer.memory, table);
    else if (staged && !transfer.send && !packs)
      packing->unpack(at, at + transfer.bytes, transfer.memory, table);
}

void launch(const Phase &phase, bool packs, std::vector<Operation> &operations) {
  kernels::Table table;
  launch(phase, packs, table);
  append(operations, std::move(table));
}

/// Whether what a phase packs, or unpacks, stands where another sends or receives.
bool clash(const Phase &phase, bool packs, const Phase &other, bool sends, bool receives) {
  for (const Chunk &mine : phase.chunks)
    for (const Chunk &theirs : other.chunks)
      if (mine.staged && mine.transfer.send == packs && (theirs.transfer.send ? sends : receives) &&
          mine.transfer.memory < theirs.transfer.memory + theirs.transfer.bytes && theirs.transfer.memory < mine.transfer.memory + mine.transfer.bytes)
        return true;
  return false;
}

void addExchanges(const std::vector<Phase> &phases, std::vector<Operation> &operations) {
  bool packed = false; // beside the phase before
  for (size_t k = 0; k < phases.size(); ++k) {
    const Phase &phase = phases[k], *before = k > 0 ? &phases[k - 1] : nullptr, *next = k + 1 < phases.size() ? &phases[k + 1] : nullptr;
    const auto number = static_cast<int64_t>(k);
    const bool unpackFirst = before && (phase.needs >= number - 1 || (next && next->needs >= number - 1) || clash(*before, false, phase, true, true));
    if (unpackFirst)
      launch(*before, false, operations);
    if (!packed)
      launch(phase, true, operations);
    auto &exchange = std::get<Exchange>(operations.emplace_back(std::in_place_type<Exchange>));
    if (before && !unpackFirst)
      launch(*before, false, exchange.beside);
    packed = next && next->needs < number && !clash(*next, true, phase, true, true) && !(before && clash(*next, true, *before, false, true));
    if (packed)
      launch(*next, true, exchange.beside);
    for (const Chunk &chunk : phase.chunks)
      exchange.transfers.push_back(chunk.transfer);
  }
  if (!phases.empty())
    launch(phases.back(), false, operations);
}

/// Of a step's operands, those that are packed or unpacked.
std::string addOperands(const LocalRank &rank, uint32_t first, uint32_t count, Packing &packing) {
  for (uint32_t i = 0; i < count; ++i)
    if (std::string error = packing.add(rank, *rank.segment->operands()->Get(first + i)); !error.empty())
      return error;
  return {};
}

/// What a rank sends to itself.
struct Self {
  Packing out, in;
};

/// The copies and fills of a rank; copies as messages to itself where there is staging for them.
std::string addLocal(const LocalRank &rank, const Staging &staging, Self &self, std::vector<Operation> &operations, std::vector<Phase> &phases) {
  kernels::Table table;
  for (const Step *step : *rank.segment->steps())
    if (step->kind() == StepKind::copy && staging.self) {
      if (std::string error = addOperands(rank, step->first_input(), step->input_count(), self.out); !error.empty())
        return error;
      if (std::string error = addOperands(rank, step->first_output(), step->output_count(), self.in); !error.empty())
        return error;
    } else if (step->kind() == StepKind::copy || step->kind() == StepKind::fill) {
      for (uint32_t i = 0; i < step->output_count(); ++i) {
        const Operand *input = step->kind() == StepKind::copy ? rank.segment->operands()->Get(step->first_input() + i) : nullptr;
        if (std::string error = addCopy({&rank, input}, {&rank, rank.segment->operands()->Get(step->first_output() + i)}, table); !error.empty())
          return error;
      }
    }
  append(operations, std::move(table));
  for (uint64_t at = 0, chunk = 0; at < self.out.bytes(); at += staging.selfBytes, ++chunk) {
    const uint64_t bytes = std::min(self.out.bytes() - at, staging.selfBytes), chunks = (self.out.bytes() + staging.selfBytes - 1) / staging.selfBytes;
    std::byte *const sent = staging.self + chunk % 2 * staging.selfBytes, *const received = sent + 2 * staging.selfBytes;
    phases.push_back({{{&self.out, at, true, {true, rank.rank, sent, bytes, 0, 0, chunk, chunks}}, {&self.in, at, true, {false, rank.rank, received, bytes, 0, 0, chunk, chunks}}}, -1});
  }
  return {};
}

bool shareArena(const Step &a, const Step &b) {
  auto end = [](const Step &step) { return step.staging() + (step.chunk() > 0 ? 2 * step.chunk() : step.bytes()); };
  return a.staging() != UINT64_MAX && b.staging() != UINT64_MAX && a.staging() < end(b) && b.staging() < end(a);
}

/// A send or a receive.
struct Message {
  const Step *step;
  Packing packing;
  /// By chunk: one more than the latest time whose receives it needs; 0: none.
  std::vector<uint64_t> needs;
};

/// Finds what the chunks of a step need; an error text where that does not come at earlier times.
std::string findNeeds(const LocalRank &rank, uint32_t number, Message &message) {
  const Step &step = *message.step;
  const bool send = step.kind() == StepKind::send;
  const std::vector<std::vector<uint64_t>> before = send ? chunksBefore(*rank.segment, step) : std::vector<std::vector<uint64_t>>();
  message.needs.resize(chunkCount(step));
  for (uint32_t i = 0; i < step.after_count(); ++i) {
    const uint32_t other = rank.segment->after()->Get(step.first_after() + i);
    const Step &earlier = *rank.segment->steps()->Get(other);
    if (earlier.kind() == StepKind::copy || earlier.kind() == StepKind::fill)
      continue; // done before all messages
    const bool passesOn = send && earlier.kind() == StepKind::recv && !shareArena(step, earlier);
    for (uint64_t c = 0; c < chunkCount(step); ++c) {
      const uint64_t needed = passesOn ? before[i][c] : chunkCount(earlier);
      if (needed > 0 && earlier.round() + needed - 1 >= step.round() + c)
        return "step " + std::to_string(number) + " of rank " + std::to_string(rank.rank) + " needs chunk " + std::to_string(needed - 1) + " of step " + std::to_string(other) +
               " before its chunk " + std::to_string(c) + ", expected it to come in an earlier round";
      if (needed > 0 && send && earlier.kind() == StepKind::recv)
        message.needs[c] = std::max(message.needs[c], earlier.round() + needed);
    }
  }
  return {};
}

} // namespace

std::string addWaves(const Plan &plan, const std::vector<LocalRank> &ranks, std::vector<Operation> &operations, uint64_t &bytes) {
  std::vector<kernels::Table> waves;
  std::string error = forEachCopy(plan, ranks, [&](uint32_t wave, const LocalRank &from, const Operand *input, const LocalRank &to, const Operand *output) {
    if (!output)
      return "rank " + std::to_string(to.rank) + " converts what it gets, which no device does yet, expected device 'cpu'";
    waves.resize(std::max<size_t>(waves.size(), wave + 1));
    return addCopy({&from, input}, {&to, output}, waves[wave]);
  });
  for (kernels::Table &wave : waves) {
    bytes += wave.bytes();
    append(operations, std::move(wave));
  }
  return error;
}

uint64_t selfChunk(const LocalRank &rank, uint64_t most) {
  uint64_t bytes = 0;
  for (const Step *step : *rank.segment->steps())
    bytes += step->kind() == StepKind::copy ? step->bytes() : 0;
  return (std::min(bytes, most) + 255) / 256 * 256;
}

std::string addPhases(const LocalRank &rank, const Staging &staging, std::vector<Operation> &operations, uint64_t &bytes) {
  Self self;
  std::vector<Phase> phases;
  if (std::string error = addLocal(rank, staging, self, operations, phases); !error.empty())
    return error;
  const auto local = static_cast<int64_t>(phases.size());
  std::vector<Message> messages;
  for (uint32_t s = 0; s < rank.segment->steps()->size(); ++s) {
    const Step &step = *rank.segment->steps()->Get(s);
    const bool send = step.kind() == StepKind::send;
    bytes += send ? 0 : step.bytes();
    if (!send && step.kind() != StepKind::recv)
      continue;
    Message &message = messages.emplace_back(Message{&step, {}, {}});
    if (std::string error = send ? addOperands(rank, step.first_input(), step.input_count(), message.packing)
                                 : addOperands(rank, step.first_output(), step.output_count(), message.packing);
        !error.empty())
      return error;
    if (message.packing.converts())
      return "rank " + std::to_string(rank.rank) + " converts what it gets or sends, which no device does yet, expected device 'cpu'";
    if (step.staging() == UINT64_MAX && !message.packing.contiguous())
      return "step " + std::to_string(s) + " is in place, but its bytes do not stand side by side";
    if (std::string error = findNeeds(rank, s, message); !error.empty())
      return error;
  }
  // Two ranks that exchange several messages at one time take them in the order of their numbers, both.
  std::stable_sort(messages.begin(), messages.end(), [](const Message &a, const Message &b) { return a.step->message() < b.step->message(); });
  std::map<uint64_t, std::vector<std::pair<const Message *, uint64_t>>> times; // chunks
  for (const Message &message : messages)
    for (uint64_t chunk = 0; chunk < chunkCount(*message.step); ++chunk)
      times[message.step->round() + chunk].emplace_back(&message, chunk);
  std::map<uint64_t, int64_t> numbers; // of phases, by time
  for (const auto &[time, chunks] : times) {
    numbers[time] = static_cast<int64_t>(phases.size());
    Phase &phase = phases.emplace_back();
    phase.needs = local - 1; // what it copied itself
    for (const auto &[message, chunk] : chunks) {
      const Step &step = *message->step;
      const bool send = step.kind() == StepKind::send, staged = step.staging() != UINT64_MAX;
      const uint64_t at = chunk * step.chunk();
      std::byte *memory = staged ? staging.arena + step.staging() + (step.slot() + chunk) % 2 * step.chunk() : message->packing.contiguous() + at;
      phase.chunks.push_back({&message->packing, at, staged, {send, step.peer(), memory, chunkBytes(step, chunk), step.message(), step.round(), chunk, chunkCount(step)}});
      if (message->needs[chunk] > 0)
        phase.needs = std::max(phase.needs, numbers.at(message->needs[chunk] - 1));
    }
  }
  addExchanges(phases, operations);
  return {};
}

} // namespace reshard
