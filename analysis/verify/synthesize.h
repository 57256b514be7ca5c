// Synthesized values, and the check that target memory holds them, from the manifest's layouts alone: transfers are not
// read.
#pragma once

#include "executor/load.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reshard::analysis {

/// The stored code of an element that is received as `code`, for a param with another storage dtype.
uint64_t castCode(const schema::Param &param, uint64_t code);

/// Element i (row-major in the whole logical tensor) of the tensor named t: the low bytes of
///   mix(seed, t, i) = finish(finish(fnv1a64(t) + 0x9e3779b97f4a7c15 * (seed + 1)) + 0xd1b54a32d192ed03 * i)
/// where finish is the finalizer of splitmix64 (Steele, Lea, Flood 2014; Stafford's variant 13). A bool is its lowest
/// bit.
uint64_t tensorKey(std::string_view tensor, uint64_t seed);
uint64_t elementHash(uint64_t key, uint64_t index);

/// The memory of all instances of one mesh rank of one endpoint, by param and instance. Quantized views have none.
/// Params with a transform have memory only where the tools replace the caller.
struct MeshRankMemory {
  uint32_t endpoint = 0, meshRank = 0;
  std::vector<std::vector<std::byte *>> params;
};

/// A run of consecutive logical elements of one tensor inside a param instance, or of zeros.
struct ElementRun {
  const std::string *tensor = nullptr; // full name; null: padding
  int pattern = -1;                    // its pattern
  int64_t logical = 0;                 // first row-major index in the logical tensor
  int64_t logicalStep = 1;             // from one element to the next
  int64_t local = 0;                   // first element in the instance
  int64_t localStep = 1;
  int64_t count = 0;
};

/// The elements that a part of a param holds of one tensor (or padding), in one instance: one element for each
/// combination of positions, one position of each dimension.
struct PartGrid {
  /// Positions as blocks of (logical, local) pairs.
  struct Dimension {
    std::vector<schema::IndexBlock> blocks;
    int64_t logicalStride = 0, localStride = 0; // elements per position
  };
  const std::string *tensor = nullptr; // as in ElementRun
  int pattern = -1;
  int64_t local = 0; // first element of the part, at position 0 of each dimension
  std::vector<Dimension> dimensions;
};
void forEachPartGrid(const schema::Manifest &manifest, const schema::Endpoint &endpoint, uint32_t param,
                     int64_t meshRank, const schema::ParamInstance &instance,
                     const std::function<void(const PartGrid &)> &visit);

/// Calls visit(run) for every run of one instance of a param on a mesh rank, part by part.
void forEachRun(const schema::Manifest &manifest, const schema::Endpoint &endpoint, uint32_t param, int64_t meshRank,
                const schema::ParamInstance &instance, const std::function<void(const ElementRun &)> &visit);

/// The coordinates on which a param's layout depends. Mesh ranks with equal keys hold the same elements.
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

/// Fills the memory of a mesh rank with synthesized values, and padding with 0xAB, which must not reach a target.
/// Quantized params get the quantized form of synthesized elements.
void synthesize(const Plan &plan, const MeshRankMemory &memory, uint64_t seed, unsigned threads);

struct CheckResult {
  uint64_t checkedBytes = 0, mismatches = 0; // checkedBytes in bytes, mismatches in elements
  std::string first;                         // describes the first mismatch
  std::string ambiguity; // why the right values are unknown: the source has two values for one element; else empty

  /// Adds the result of a part of the work.
  void add(CheckResult &&part);
};

/// Compares every element of a target's mesh rank with the value that its layout requires. An element that no part
/// covers counts as a mismatch. Codes and scales are compared with the quantized form of the values received.
CheckResult check(const Plan &plan, const MeshRankMemory &memory, uint64_t seed, unsigned threads);

/// The same, with the source's values from a reference (analysis/verify/reference.h) that all mesh ranks may share.
class Reference;
CheckResult check(const Plan &plan, const MeshRankMemory &memory, Reference &reference, unsigned threads);

/// Checks only the quantized params, through their views. Works with a source in memory too.
CheckResult checkViews(const Plan &plan, const MeshRankMemory &memory, Reference &reference, unsigned threads);

} // namespace reshard::analysis
