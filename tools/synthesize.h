// What every byte must be, from the manifest's layouts alone: the transfers are never looked at.
#pragma once

#include "executor/load.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reshard::tools {

/// How a param that casts stores an element that comes as `code`.
uint64_t castCode(const schema::Param &param, uint64_t code);

/// Element i (row-major in the whole logical tensor) of the tensor named t: the low bytes of
///   mix(seed, t, i) = finish(finish(fnv1a64(t) + 0x9e3779b97f4a7c15 * (seed + 1)) + 0xd1b54a32d192ed03 * i)
/// finish being the finaliser of splitmix64 (Steele, Lea, Flood 2014; Stafford's variant 13). A bool is its lowest bit.
uint64_t tensorKey(std::string_view tensor, uint64_t seed);
uint64_t elementHash(uint64_t key, uint64_t index);

/// The memory of all instances of one place of one endpoint: by param, instance by instance. Faces have none; what has
/// a transform has some where the tools stand in for the caller.
struct MeshRankMemory {
  uint32_t endpoint = 0, meshRank = 0;
  std::vector<std::vector<std::byte *>> params;
};

/// A run of consecutive logical elements of one tensor inside a param instance, or of zeros.
struct ElementRun {
  const std::string *tensor = nullptr; // full name; null: padding
  int pattern = -1;                    // its pattern
  int64_t logical = 0;                 // first row-major index in the logical tensor
  int64_t logicalStep = 1;             // between neighbours
  int64_t local = 0;                   // first element in the instance
  int64_t localStep = 1;
  int64_t count = 0;
};

/// What a part of a param holds of one tensor, or of zeros, in one instance: an element for each choice of a position
/// of each dimension.
struct PartGrid {
  /// Positions in runs: (logical, local) blocks.
  struct Dimension {
    std::vector<schema::IndexBlock> blocks;
    int64_t logicalStride = 0, localStride = 0; // elements per position
  };
  const std::string *tensor = nullptr; // as in ElementRun
  int pattern = -1;
  int64_t local = 0; // of the positions 0
  std::vector<Dimension> dimensions;
};
void forEachPartGrid(const schema::Manifest &manifest, const schema::Endpoint &endpoint, uint32_t param,
                     int64_t meshRank, const schema::ParamInstance &instance,
                     const std::function<void(const PartGrid &)> &visit);

/// Calls visit(run) for every run of one instance of a param on a place, part by part.
void forEachRun(const schema::Manifest &manifest, const schema::Endpoint &endpoint, uint32_t param, int64_t meshRank,
                const schema::ParamInstance &instance, const std::function<void(const ElementRun &)> &visit);

/// What a param's layout on a place depends on: places where it is the same hold the same.
std::vector<int64_t> equivalenceKey(const schema::Endpoint &endpoint, uint32_t param, int64_t meshRank);

/// How many elements of an instance no part of its layout covers.
int64_t uncovered(const schema::Manifest &manifest, const schema::Endpoint &endpoint, uint32_t param, int64_t meshRank,
                  const schema::ParamInstance &instance);

/// Which elements of an instance its parts have covered.
class Coverage {
public:
  explicit Coverage(int64_t elements) : elements_(elements), words_(static_cast<size_t>((elements + 63) / 64)) {}
  void add(int64_t first, int64_t step, int64_t count);
  int64_t missing() const;
  int64_t elements() const { return elements_; }

private:
  int64_t elements_;
  std::vector<uint64_t> words_;
};

/// Fills the memory of a place with synthesised values; padding gets 0xAB, which no target may take over. What stands
/// quantised becomes what its elements are quantised to.
void synthesize(const Plan &plan, const MeshRankMemory &memory, uint64_t seed, unsigned threads);

struct CheckResult {
  uint64_t checkedBytes = 0, mismatches = 0; // bytes; elements
  std::string first;                         // the first mismatch in words
  std::string ambiguity; // why there is no saying what is right, where the source shows two values of one element

  /// Takes in what a part of the work found.
  void add(CheckResult &&part);
};

/// Compares every element of a target place with what its layout says it must be. An element that no part covers counts
/// as a mismatch. Codes and scales are compared with what the values that come are quantised to.
CheckResult check(const Plan &plan, const MeshRankMemory &memory, uint64_t seed, unsigned threads);

/// The same where the source's values are known (tools/reference.h): all places may share them.
class Reference;
CheckResult check(const Plan &plan, const MeshRankMemory &memory, Reference &reference, unsigned threads);

/// The faces alone, of values from a source in memory too: params that stand quantised.
CheckResult checkViews(const Plan &plan, const MeshRankMemory &memory, Reference &reference, unsigned threads);

} // namespace reshard::tools
