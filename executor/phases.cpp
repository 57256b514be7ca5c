#include "executor/phases.h"

#include "executor/chunks.h"
#include "executor/packing.h"
#include "executor/waves.h"

#include <algorithm>
#include <map>

namespace reshard {

using namespace schema;

namespace {

struct Message {
  const Step *step;
  Packing packing;
};

/// Of a step's operands, those that are packed or unpacked.
std::string addOperands(const LocalRank &rank, uint32_t first, uint32_t count, Packing &packing) {
  for (uint32_t i = 0; i < count; ++i)
    if (std::string error = packing.add(rank, *rank.segment->operands()->Get(first + i)); !error.empty())
      return error;
  return {};
}

void append(std::vector<Operation> &operations, kernels::Table copies) {
  if (!copies.empty())
    operations.push_back(std::move(copies));
}

/// The copies and fills of a rank; copies as messages to itself where there is staging for them.
std::string addLocal(const LocalRank &rank, const Staging &staging, std::vector<Operation> &operations) {
  kernels::Table table;
  Packing out, in;
  for (const Step *step : *rank.segment->steps())
    if (step->kind() == StepKind::copy && staging.self) {
      if (std::string error = addOperands(rank, step->first_input(), step->input_count(), out); !error.empty())
        return error;
      if (std::string error = addOperands(rank, step->first_output(), step->output_count(), in); !error.empty())
        return error;
    } else if (step->kind() == StepKind::copy || step->kind() == StepKind::fill) {
      for (uint32_t i = 0; i < step->output_count(); ++i) {
        const Operand *input = step->kind() == StepKind::copy ? rank.segment->operands()->Get(step->first_input() + i) : nullptr;
        if (std::string error = addCopy({&rank, input}, {&rank, rank.segment->operands()->Get(step->first_output() + i)}, table); !error.empty())
          return error;
      }
    }
  append(operations, std::move(table));
  std::byte *const sent = staging.self, *const received = staging.self + staging.selfBytes;
  for (uint64_t at = 0, chunk = 0; at < out.bytes(); at += staging.selfBytes, ++chunk) {
    const uint64_t end = std::min(out.bytes(), at + staging.selfBytes), chunks = (out.bytes() + staging.selfBytes - 1) / staging.selfBytes;
    kernels::Table pack, unpack;
    out.pack(at, end, sent, pack);
    in.unpack(at, end, received, unpack);
    append(operations, std::move(pack));
    operations.push_back(std::vector<Transfer>{{true, rank.rank, sent, end - at, 0, 0, chunk, chunks}, {false, rank.rank, received, end - at, 0, 0, chunk, chunks}});
    append(operations, std::move(unpack));
  }
  return {};
}

bool shareArena(const Step &a, const Step &b) {
  auto end = [](const Step &step) { return step.staging() + (step.chunk() > 0 ? 2 * step.chunk() : step.bytes()); };
  return a.staging() != UINT64_MAX && b.staging() != UINT64_MAX && a.staging() < end(b) && b.staging() < end(a);
}

/// Whether what each chunk of a step needs is done at earlier times.
std::string checkOrder(const LocalRank &rank, uint32_t number) {
  const Step &step = *rank.segment->steps()->Get(number);
  const bool send = step.kind() == StepKind::send;
  const std::vector<std::vector<uint64_t>> before = send ? chunksBefore(*rank.segment, step) : std::vector<std::vector<uint64_t>>();
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
    }
  }
  return {};
}

} // namespace

std::string addWaves(const Plan &plan, const std::vector<LocalRank> &ranks, std::vector<Operation> &operations, uint64_t &bytes) {
  std::vector<kernels::Table> waves;
  std::string error = forEachCopy(plan, ranks, [&](uint32_t wave, const LocalRank &from, const Operand *input, const LocalRank &to, const Operand &output) {
    waves.resize(std::max<size_t>(waves.size(), wave + 1));
    return addCopy({&from, input}, {&to, &output}, waves[wave]);
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
  if (std::string error = addLocal(rank, staging, operations); !error.empty())
    return error;
  std::vector<Message> messages;
  for (uint32_t s = 0; s < rank.segment->steps()->size(); ++s) {
    const Step &step = *rank.segment->steps()->Get(s);
    const bool send = step.kind() == StepKind::send;
    bytes += send ? 0 : step.bytes();
    if (!send && step.kind() != StepKind::recv)
      continue;
    Message &message = messages.emplace_back(Message{&step, {}});
    if (std::string error = send ? addOperands(rank, step.first_input(), step.input_count(), message.packing)
                                 : addOperands(rank, step.first_output(), step.output_count(), message.packing);
        !error.empty())
      return error;
    if (step.staging() == UINT64_MAX && !message.packing.contiguous())
      return "step " + std::to_string(s) + " is in place, but its bytes do not stand side by side";
    if (std::string error = checkOrder(rank, s); !error.empty())
      return error;
  }
  // Two ranks that exchange several messages at one time take them in the order of their numbers, both.
  std::stable_sort(messages.begin(), messages.end(), [](const Message &a, const Message &b) { return a.step->message() < b.step->message(); });
  std::map<uint64_t, std::vector<const Message *>> begins; // by time
  for (const Message &message : messages)
    begins[message.step->round()].push_back(&message);
  std::vector<const Message *> going;
  for (uint64_t time = begins.empty() ? 0 : begins.begin()->first; !begins.empty() || !going.empty(); ++time) {
    if (going.empty())
      time = begins.begin()->first; // nothing between
    if (!begins.empty() && begins.begin()->first == time) {
      going.insert(going.end(), begins.begin()->second.begin(), begins.begin()->second.end());
      std::sort(going.begin(), going.end(), [](const Message *a, const Message *b) { return a->step->message() < b->step->message(); });
      begins.erase(begins.begin());
    }
    kernels::Table pack, unpack;
    std::vector<Transfer> transfers;
    for (const Message *message : going) {
      const Step &step = *message->step;
      const bool send = step.kind() == StepKind::send, inPlace = step.staging() == UINT64_MAX;
      const uint64_t chunk = time - step.round(), at = chunk * step.chunk(), length = chunkBytes(step, chunk);
      std::byte *place = inPlace ? message->packing.contiguous() + at : staging.arena + step.staging() + (step.slot() + chunk) % 2 * step.chunk();
      if (!inPlace && send)
        message->packing.pack(at, at + length, place, pack);
      if (!inPlace && !send)
        message->packing.unpack(at, at + length, place, unpack);
      transfers.push_back({send, step.peer(), place, length, step.message(), step.round(), chunk, chunkCount(step)});
    }
    append(operations, std::move(pack));
    operations.push_back(std::move(transfers));
    append(operations, std::move(unpack));
    std::erase_if(going, [&](const Message *message) { return time - message->step->round() + 1 == chunkCount(*message->step); });
  }
  return {};
}

} // namespace reshard
