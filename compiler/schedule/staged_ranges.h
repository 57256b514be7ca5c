// Where a rank gathers what it quantises when all of a block is there: rows of blocks of its params, in the arena, as
// many at a time as fit.
#pragma once

#include "compiler/resolve/interner.h"
#include "ir/ir.h"

#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace reshard {

/// Whole rows of blocks of one instance of a face.
struct StagedRange {
  unsigned endpoint = 0;
  int32_t meshRank = 0;
  uint32_t instance = 0;      // over all params of the place
  int64_t begin = 0, end = 0; // bytes of the instance
  uint32_t phase = 0;         // of the rank's generation: what is in one is there at one time
  int64_t offset = 0;         // in the arena
};

class StagedRanges {
public:
  explicit StagedRanges(const ir::Layout &layout);

  /// Plans all ranks. `remote`: bytes that move between ranks, for which staging must be left. An error text, empty on
  /// success: one row of blocks does not fit the staging limit.
  std::string plan(int64_t remote);

  /// The rank that writes to an instance of a face, or of the largest magnitudes for it: its own, and in files one for
  /// each instance; -1 where anyone may.
  int32_t writer(unsigned endpoint, int32_t meshRank, uint32_t instance) const;
  /// Whether one rank must write to an instance though others could, or rows of blocks of it are gathered.
  bool needsCut(unsigned endpoint, int32_t meshRank, uint32_t instance) const {
    return find(endpoint, meshRank, instance, 0) ||
           (layout_.endpoints[endpoint].storage && writer(endpoint, meshRank, instance) >= 0);
  }
  /// The param of an instance of a place.
  unsigned paramOf(unsigned endpoint, int32_t meshRank, uint32_t instance) const;
  /// The band of a byte of an instance; null where it is not gathered.
  const StagedRange *find(unsigned endpoint, int32_t meshRank, uint32_t instance, int64_t offset) const;
  /// In which phase values of a param may come, where they are not gathered.
  uint32_t phaseOf(const ir::Param &param) const;

  /// Of a rank, in order of phases; bytes of the arena that they take.
  const std::vector<StagedRange> &of(int32_t rank) const { return ranges_[rank]; }
  int64_t bytes(int32_t rank) const { return bytes_[rank]; }

private:
  struct Rows {
    StagedRange all;    // of the instance
    int64_t row = 0;    // bytes of a row of blocks
    int64_t matrix = 0; // bytes of a matrix, whose last row may be shorter
    bool later = false; // not in the first phase
    std::string name;
  };
  std::vector<std::vector<Rows>> rows() const;
  void planRank(int32_t rank, std::vector<Rows> &rows, int64_t limit);

  const ir::Layout &layout_;
  std::vector<std::vector<std::vector<uint32_t>>> firsts_; // by endpoint and place: the first instance of each param
  std::vector<std::vector<StagedRange>> ranges_;           // by rank
  std::vector<int64_t> bytes_;
  std::map<std::tuple<unsigned, int32_t, uint32_t>, std::vector<StagedRange>> byInstance_;
};

/// Appends a descriptor in parts, each of one instance and, where that is gathered, within one band. Shapes of parts
/// are interned.
void cutAtStagedRanges(const ir::Descriptor &descriptor, const StagedRanges &stagedRanges, Interner<ir::Shape> &shapes,
                       std::vector<ir::Descriptor> &parts);

/// What is scheduled together: targets that joined at one time, and of what a rank gathers that which is there at one
/// time (bands.h).
struct EpochPhase {
  uint32_t epoch = 0, phase = 0;
  auto operator<=>(const EpochPhase &) const = default;
};

class PhaseSteps {
public:
  /// Steps go to the module's schedule, whose buffers are known; shapes of operands of rank r are interned in
  /// shapes[r].
  PhaseSteps(ir::Module &module, const StagedRanges &stagedRanges, std::vector<Interner<ir::OperandShape>> &shapes)
      : module_(module), stagedRanges_(stagedRanges), shapes_(shapes) {}

  /// A rank has faces of a target.
  void watch(int32_t rank) { state_[rank].any = true; }
  /// Appends a step of a stage; it waits for what it needs of the stages before.
  void append(int32_t rank, ir::Step step, const EpochPhase &when);
  /// Appends what is done when all of a stage is there: tensor scales are made, and what was gathered is quantised.
  void finish(int32_t rank, const EpochPhase &when, uint32_t round);

private:
  /// What a step has to do with what is quantised in the arena or behind largest magnitudes.
  struct Needs {
    bool writesStaged = false, largest = false, tensorScales = false;
  };
  /// Of a rank: the steps that write what is gathered in a stage, and the largest magnitudes of a generation; the last
  /// step that converted, that reduced.
  struct State {
    bool any = false;
    std::map<EpochPhase, std::vector<uint32_t>> writers;
    std::map<uint32_t, std::vector<uint32_t>> largest;
    int64_t converted = -1, reduced = -1;
  };
  Needs needs(int32_t rank, const ir::Step &step);
  void put(int32_t rank, ir::Step step, uint32_t round, const std::vector<uint32_t> &after, int64_t &number);

  ir::Module &module_;
  const StagedRanges &stagedRanges_;
  std::vector<Interner<ir::OperandShape>> &shapes_;
  std::map<int32_t, State> state_; // by rank
};

} // namespace reshard
