// Steps of ranks in stages: what is gathered to be quantised waits for its room and is quantised at the end of its
// stage; what needs tensor scales waits for them.
#pragma once

#include "compiler/bands.h"

#include <map>
#include <vector>

namespace reshard {

/// What is scheduled together: targets that joined at one time, and of what a rank gathers that which is there at one
/// time (bands.h).
using Stage = std::pair<uint32_t, uint32_t>; // generation, phase

class StageSteps {
public:
  /// Steps go to the module's schedule, whose buffers are known; shapes of operands of rank r are interned in
  /// shapes[r].
  StageSteps(ir::Module &module, const Bands &bands, std::vector<Interner<ir::OperandShape>> &shapes)
      : module_(module), bands_(bands), shapes_(shapes) {}

  /// A rank has faces of a target.
  void watch(int32_t rank) { state_[rank].any = true; }
  /// Appends a step of a stage; it waits for what it needs of the stages before.
  void append(int32_t rank, ir::Step step, const Stage &stage);
  /// Appends what is done when all of a stage is there: tensor scales are made, and what was gathered is quantised.
  void finish(int32_t rank, const Stage &stage, uint32_t round);

private:
  /// What a step has to do with what is quantised in the arena or behind largest magnitudes.
  struct Needs {
    bool gathers = false, largest = false, tensorScales = false;
  };
  /// Of a rank: the steps that write what is gathered in a stage, and the largest magnitudes of a generation; the last
  /// step that converted, that reduced.
  struct State {
    bool any = false;
    std::map<Stage, std::vector<uint32_t>> writers;
    std::map<uint32_t, std::vector<uint32_t>> largest;
    int64_t converted = -1, reduced = -1;
  };
  Needs needs(int32_t rank, const ir::Step &step);
  void put(int32_t rank, ir::Step step, uint32_t round, const std::vector<uint32_t> &after, int64_t &number);

  ir::Module &module_;
  const Bands &bands_;
  std::vector<Interner<ir::OperandShape>> &shapes_;
  std::map<int32_t, State> state_; // by rank
};

} // namespace reshard
