// SPDX-License-Identifier: Apache-2.0
// Synthesized values: the value of an element follows from a seed, its tensor and its index.
#pragma once

#include "executor/load/load.h"
#include "schema/element_ranges.h"
#include "verify/layout/mesh_rank_memory.h"
#include "verify/layout/quantized_views.h"

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace reshard::verify {

/// Element i (row-major in the whole logical tensor) of the tensor named t: the low bytes of
///   mix(seed, t, i) = finish(finish(fnv1a64(t) + 0x9e3779b97f4a7c15 * (seed + 1)) + 0xd1b54a32d192ed03 * i)
/// where finish is the finalizer of splitmix64 (Steele, Lea, Flood 2014; Stafford's variant 13). A bool is its lowest
/// bit.
uint64_t tensorKey(std::string_view tensor, uint64_t seed);
uint64_t elementHash(uint64_t key, uint64_t index);

/// Whether a plan casts or quantizes any param.
struct PlanConversions {
  explicit PlanConversions(const schema::Manifest &manifest);
  bool cast = false, quantized = false;
};

/// The synthesized values of a param's elements, as functions of the tensor's key and the element's index.
struct SynthesizedValues {
  const schema::Param *param;
  schema::DType sentDtype, storageDtype;
  uint64_t mask = ~uint64_t{0}, ones = 0; // bits of the sent code to keep, and to set

  /// For a param. In plans that cast, all floats are finite: the highest bit of the exponent is 0. In plans that
  /// quantize, they are also near 1, so that few elements of a block are rounded to 0: of the exponent's other bits all
  /// but the lowest four are 1.
  SynthesizedValues(const PlanConversions &conversions, const schema::Param &of);
  bool plain() const { return sentDtype == storageDtype && mask == ~uint64_t{0}; }
  uint64_t operator()(uint64_t key, uint64_t element) const;
  /// The stored code of an element that is received as `code`, for a param with another storage dtype.
  uint64_t cast(uint64_t code) const;
  /// The same for `count` codes in a row, faster.
  void cast(const std::byte *sent, std::byte *stored, int64_t count) const;
  /// How many codes in a row are beyond the range of the storage dtype, if the param's rule makes that an error. A run
  /// that continues an unfinished one has not cast all of them itself.
  int64_t countBeyond(const std::byte *sent, int64_t count) const;
};

/// Writes the synthesized values of elements of the tensor with this key.
void fill(std::byte *memory, const schema::ElementRange &range, uint64_t key, const SynthesizedValues &values);

/// Fills an instance of a param or of a quantized view through its parts; padding gets 0xAB.
void synthesizeInstance(const PlanConversions &conversions, const schema::InstanceLayout &layout, uint64_t seed,
                        std::byte *memory);

/// The contents of the base params of a view of kind `elements`, for synthesized elements in an instance of the view.
std::vector<Bytes> synthesizeBases(const PlanConversions &conversions, const schema::InstanceLayout &elements,
                                   uint64_t seed);

/// Fills the memory of a mesh rank with synthesized values, and padding with 0xAB, which must not reach a target.
/// Quantized params get the quantized form of synthesized elements.
void synthesize(const Plan &plan, const MeshRankMemory &memory, uint64_t seed, unsigned threads);

} // namespace reshard::verify
