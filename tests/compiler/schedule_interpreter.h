// SPDX-License-Identifier: Apache-2.0
// Interprets a schedule on labeled elements. Of all actions that may happen next, it chooses a random one, so that it
// covers every order that an executor may use.
#pragma once

#include "ir/ir.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <vector>

namespace reshard::ir {

/// The memory of an endpoint: one 64-bit label for each element, by mesh rank, instance and element.
using Memory = std::vector<std::vector<std::vector<int64_t>>>;

/// A step waits only for the steps of its `after`. A chunk of a message is packed into the sender's slot once the slot
/// is free (a message in place is read when it is sent). It crosses once the receive has started and its slot is free,
/// and is unpacked some time later. An early read, or a slot that is used too early, therefore gives wrong labels, and
/// a cycle of dependences is reported as a deadlock.
class ScheduleInterpreter {
public:
  static constexpr int64_t kUnwritten = -1;

  /// `memory`: of each endpoint; the source is only read.
  ScheduleInterpreter(const Module &module, std::vector<Memory> &memory, uint64_t seed)
      : module_(module), memory_(memory), random_(seed) {
    for (const RankSchedule &rank : module.schedule.ranks) {
      arenas_.emplace_back(rank.arenaBytes, kUnwritten);
      states_.emplace_back(rank.steps.size());
      for (uint32_t s = 0; s < rank.steps.size(); ++s)
        if (rank.steps[s].kind == StepKind::send)
          sends_[rank.steps[s].message] = {rank.rank, s};
        else if (rank.steps[s].kind == StepKind::recv)
          receives_[rank.steps[s].message] = {rank.rank, s};
    }
  }

  void run() {
    std::vector<At> open;
    for (const RankSchedule &rank : module_.schedule.ranks)
      for (uint32_t s = 0; s < rank.steps.size(); ++s)
        open.push_back({rank.rank, s});
    while (!open.empty()) {
      std::shuffle(open.begin(), open.end(), random_);
      bool any = false;
      for (const At &at : open)
        any = advance(at) || any;
      ASSERT_TRUE(any) << "deadlock with " << open.size() << " steps left";
      std::erase_if(open, [&](const At &at) { return states_[at.rank][at.step].done; });
    }
  }

private:
  /// The progress of a step: the numbers of chunks packed, sent or received, and unpacked.
  struct State {
    bool started = false, done = false;
    int64_t packed = 0, crossed = 0, unpacked = 0;
  };
  struct At {
    int32_t rank;
    uint32_t step;
  };

  const Step &stepAt(At at) const { return module_.schedule.ranks[at.rank].steps[at.step]; }

  /// Whether the steps that a step waits for are done.
  bool mayStart(At at) const {
    for (uint32_t before : stepAt(at).after)
      if (!states_[at.rank][before].done)
        return false;
    return true;
  }

  static int64_t chunks(const Step &step) { return step.chunk > 0 ? (step.bytes + step.chunk - 1) / step.chunk : 1; }
  static int64_t slots(const Step &step) { return step.chunk > 0 ? 2 : 1; }

  /// Performs the next action of a step; returns false if there is none at present.
  bool advance(At at) {
    const Step &step = stepAt(at);
    State &state = states_[at.rank][at.step];
    if (!state.started) {
      state.started = mayStart(at);
      if (state.started && step.kind == StepKind::copy) {
        write(at, 0, read(at, 0));
        state.done = true;
      }
      return state.started;
    }
    if (step.kind == StepKind::recv) {
      if (step.staging < 0 || state.unpacked == state.crossed)
        return false;
      write(at, state.unpacked, get(at, step.outputs, state.unpacked));
      state.done = ++state.unpacked == chunks(step);
      return true;
    }
    const bool packs = step.staging >= 0 && state.packed < chunks(step) && state.packed - state.crossed < slots(step);
    const At to = receives_.at(step.message);
    const Step &receive = stepAt(to);
    State &receiver = states_[to.rank][to.step];
    const bool crosses = (step.staging < 0 || state.packed > state.crossed) && receiver.started &&
                         (receive.staging < 0 || receiver.crossed - receiver.unpacked < slots(receive));
    if (packs && (!crosses || random_() % 2)) {
      put(at, state.packed, read(at, state.packed));
      ++state.packed;
      return true;
    }
    if (!crosses)
      return false;
    const std::vector<Element> elements =
        step.staging >= 0 ? get(at, step.inputs, state.crossed) : read(at, state.crossed);
    if (receive.staging >= 0)
      put(to, receiver.crossed, elements);
    else
      write(to, receiver.crossed, elements);
    ++receiver.crossed;
    state.done = ++state.crossed == chunks(step);
    receiver.done = receive.staging < 0 && state.done;
    return true;
  }

  struct Element {
    int64_t label, bytes;
  };
  struct ElementAddress {
    std::vector<int64_t> *memory;
    int64_t element, bytes;
  };

  /// The addresses of all elements of operands, in order.
  std::vector<ElementAddress> addresses(At at, const Operands &operands) {
    const RankSchedule &rank = module_.schedule.ranks[at.rank];
    std::vector<ElementAddress> result;
    for (size_t k = 0; k < operands.size(); ++k) {
      const Operand &operand = operands[k];
      const int64_t relayed = operand.buffer == 0 ? itemOfPartner(at, k) : 0;
      const OperandShape &shape = rank.shapes[operand.shape];
      std::function<void(size_t, int64_t, int64_t)> walk = [&](size_t l, int64_t buffer, int64_t offset) {
        if (l < shape.loops.size()) {
          for (int64_t i = 0; i < shape.loops[l].count; ++i)
            walk(l + 1, buffer + i * shape.loops[l].bufferStep, offset + i * shape.loops[l].stride);
          return;
        }
        for (int64_t byte = 0; relayed > 0 && byte < shape.rowBytes; byte += relayed)
          result.push_back({&arenas_[at.rank], offset + byte, relayed});
        for (const BufferRange &range : rank.buffers)
          if (buffer >= range.first && buffer < range.first + range.count) {
            const Endpoint &endpoint = module_.layout.endpoints[range.endpoint];
            size_t instance = buffer - range.first;
            for (unsigned p = 0; p < range.param; ++p)
              instance += instances(endpoint, endpoint.params[p], range.meshRank);
            const int64_t item = itemBytes(endpoint.params[range.param].dtype);
            for (int64_t at = 0; at < shape.rowBytes; at += item)
              result.push_back({&memory_[range.endpoint][range.meshRank][instance], (offset + at) / item, item});
          }
      };
      walk(0, operand.buffer, operand.offset);
    }
    return result;
  }

  /// The bytes of an element of an operand in a relay's arena: those of the param at the other end of the message.
  int64_t itemOfPartner(At at, size_t operand) const {
    const bool sends = stepAt(at).kind == StepKind::send;
    const At other = (sends ? receives_ : sends_).at(stepAt(at).message);
    const uint32_t buffer = (sends ? stepAt(other).outputs : stepAt(other).inputs)[operand].buffer;
    for (const BufferRange &range : module_.schedule.ranks[other.rank].buffers)
      if (buffer >= range.first && buffer < range.first + range.count)
        return itemBytes(module_.layout.endpoints[range.endpoint].params[range.param].dtype);
    return 0;
  }

  /// The addresses of the elements of one chunk.
  std::vector<ElementAddress> chunk(At at, const Operands &operands, int64_t number) {
    std::vector<ElementAddress> all = addresses(at, operands), result;
    const int64_t each = stepAt(at).chunk;
    int64_t begin = 0;
    for (const ElementAddress &address : all) {
      if (each == 0 || begin / each == number)
        result.push_back(address);
      begin += address.bytes;
    }
    return result;
  }

  std::vector<Element> read(At at, int64_t number) {
    std::vector<Element> elements;
    for (const ElementAddress &address : chunk(at, stepAt(at).inputs, number))
      elements.push_back({address.memory->at(address.element), address.bytes});
    return elements;
  }

  void write(At at, int64_t number, const std::vector<Element> &elements) {
    size_t next = 0;
    for (const ElementAddress &address : chunk(at, stepAt(at).outputs, number)) {
      ASSERT_LT(next, elements.size());
      const bool relayed = address.memory == &arenas_[at.rank]; // its memory is used again
      ASSERT_TRUE(relayed || address.memory->at(address.element) == kUnwritten)
          << "rank " << at.rank << " step " << at.step << " writes twice";
      address.memory->at(address.element) = elements[next++].label;
    }
    ASSERT_EQ(next, elements.size());
  }

  /// The offset of a chunk in the arena.
  int64_t staging(At at, int64_t number) const {
    const Step &step = stepAt(at);
    return step.staging + (step.chunk > 0 ? (step.slot + number) % 2 * step.chunk : 0);
  }

  void put(At at, int64_t number, const std::vector<Element> &elements) {
    int64_t next = staging(at, number);
    for (const Element &element : elements) {
      arenas_[at.rank].at(next) = element.label;
      next += element.bytes;
    }
  }

  std::vector<Element> get(At at, const Operands &operands, int64_t number) {
    std::vector<Element> elements;
    int64_t next = staging(at, number);
    for (const ElementAddress &address : chunk(at, operands, number)) {
      elements.push_back({arenas_[at.rank].at(next), address.bytes});
      next += address.bytes;
    }
    return elements;
  }

  const Module &module_;
  std::vector<Memory> &memory_; // by endpoint
  std::mt19937_64 random_;
  std::vector<std::vector<int64_t>> arenas_; // by rank and byte
  std::vector<std::vector<State>> states_;   // by rank and step
  std::map<uint32_t, At> sends_, receives_;  // by message
};

} // namespace reshard::ir
