// Plays a schedule on labelled elements as the least orderly executor would: whatever may happen next happens in a random order.
#pragma once

#include "ir/ir.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <vector>

namespace reshard::ir {

/// Memory of every instance of every place of an endpoint, one 64-bit label an element, by place and instance.
using Memory = std::vector<std::vector<std::vector<int64_t>>>;

/// Steps wait for `after` alone. A message is packed into the sender's arena (or read where it stands when it is sent), crosses when the
/// sender has packed it and the receiver's step may start, and is unpacked from the receiver's arena some time later. So an early
/// read, or a slot that is taken too soon, gives wrong labels, and a cycle gives an end with steps left.
class Player {
public:
  static constexpr int64_t kUnwritten = -1;

  Player(const Module &module, const Memory &source, Memory &target, uint64_t seed) : module_(module), source_(source), target_(target), random_(seed) {
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
      std::erase_if(open, [&](const At &at) { return states_[at.rank][at.step] == State::done; });
    }
  }

private:
  enum class State : uint8_t { waiting, ready, arrived, done };
  struct At {
    int32_t rank;
    uint32_t step;
  };

  const Step &stepAt(At at) const { return module_.schedule.ranks[at.rank].steps[at.step]; }

  bool free(At at) const {
    for (uint32_t before : stepAt(at).after)
      if (states_[at.rank][before] != State::done)
        return false;
    return true;
  }

  /// Takes the next turn of a step, where it has one.
  bool advance(At at) {
    const Step &step = stepAt(at);
    State &state = states_[at.rank][at.step];
    switch (state) {
    case State::waiting:
      if (!free(at))
        return false;
      state = State::ready;
      if (step.kind == StepKind::copy) {
        write(at, read(at));
        state = State::done;
      } else if (step.kind == StepKind::send && step.staging >= 0) {
        put(at, read(at));
      }
      return true;
    case State::ready: {
      if (step.kind != StepKind::send)
        return false;
      const At to = receives_.at(step.message);
      if (states_[to.rank][to.step] != State::ready)
        return false;
      const std::vector<Element> elements = step.staging >= 0 ? get(at, step.inputs) : read(at);
      if (stepAt(to).staging >= 0) {
        put(to, elements);
        states_[to.rank][to.step] = State::arrived;
      } else {
        write(to, elements);
        states_[to.rank][to.step] = State::done;
      }
      state = State::done;
      return true;
    }
    case State::arrived:
      write(at, get(at, step.outputs));
      state = State::done;
      return true;
    case State::done:
      return false;
    }
    return false;
  }

  struct Element {
    int64_t label, bytes;
  };
  struct Place {
    std::vector<int64_t> *memory;
    int64_t element, bytes;
  };

  /// Every element that operands name, in order.
  std::vector<Place> places(int32_t rankNumber, const std::vector<Operand> &operands) {
    const RankSchedule &rank = module_.schedule.ranks[rankNumber];
    std::vector<Place> result;
    for (const Operand &operand : operands) {
      const OperandShape &shape = rank.shapes[operand.shape];
      std::function<void(size_t, int64_t, int64_t)> walk = [&](size_t l, int64_t buffer, int64_t offset) {
        if (l < shape.loops.size()) {
          for (int64_t i = 0; i < shape.loops[l].count; ++i)
            walk(l + 1, buffer + i * shape.loops[l].bufferStep, offset + i * shape.loops[l].stride);
          return;
        }
        for (const BufferRun &run : rank.buffers)
          if (buffer >= run.first && buffer < run.first + run.count) {
            const Endpoint &endpoint = module_.layout.endpoints[run.endpoint];
            size_t instance = buffer - run.first;
            for (unsigned p = 0; p < run.param; ++p)
              instance += instances(endpoint, endpoint.params[p], run.place);
            const int64_t item = itemBytes(endpoint.params[run.param].dtype);
            auto &memory = run.endpoint == 0 ? const_cast<Memory &>(source_) : target_;
            for (int64_t at = 0; at < shape.rowBytes; at += item)
              result.push_back({&memory[run.place][instance], (offset + at) / item, item});
          }
      };
      walk(0, operand.buffer, operand.offset);
    }
    return result;
  }

  std::vector<Element> read(At at) {
    std::vector<Element> elements;
    for (const Place &place : places(at.rank, stepAt(at).inputs))
      elements.push_back({place.memory->at(place.element), place.bytes});
    return elements;
  }

  void write(At at, const std::vector<Element> &elements) {
    size_t next = 0;
    for (const Place &place : places(at.rank, stepAt(at).outputs)) {
      ASSERT_LT(next, elements.size());
      ASSERT_EQ(place.memory->at(place.element), kUnwritten) << "written twice";
      place.memory->at(place.element) = elements[next++].label;
    }
    ASSERT_EQ(next, elements.size());
  }

  void put(At at, const std::vector<Element> &elements) {
    int64_t next = stepAt(at).staging;
    for (const Element &element : elements) {
      arenas_[at.rank].at(next) = element.label;
      next += element.bytes;
    }
  }

  std::vector<Element> get(At at, const std::vector<Operand> &operands) {
    std::vector<Element> elements;
    int64_t next = stepAt(at).staging;
    for (const Place &place : places(at.rank, operands)) {
      elements.push_back({arenas_[at.rank].at(next), place.bytes});
      next += place.bytes;
    }
    return elements;
  }

  const Module &module_;
  const Memory &source_;
  Memory &target_;
  std::mt19937_64 random_;
  std::vector<std::vector<int64_t>> arenas_; // by rank and byte
  std::vector<std::vector<State>> states_;   // by rank and step
  std::map<uint32_t, At> sends_, receives_;  // by message
};

} // namespace reshard::ir
