// SPDX-License-Identifier: Apache-2.0
// Quantized views (schema/plan.fbs), instance by instance: the values that a view presents, and the values that its
// base params must hold after it is written.
#pragma once

#include "base/formats/quantized_formats.h"
#include "schema/manifest.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace reshard::verify {

using Bytes = std::vector<std::byte>;

/// The base params of a view. For kind `elements`: codes, scales and, if the format has them, tensor scales; for other
/// kinds: the one param that it presents.
std::vector<uint32_t> baseParams(const schema::QuantizedView &view);

/// For each param of an endpoint that is a base of an `elements` view: that view, and the param's index in
/// baseParams(view).
struct BaseOf {
  uint32_t view, number;
};
std::vector<std::optional<BaseOf>> elementViews(const schema::Endpoint &endpoint);

/// The derived params of a target that writing a view produces. `elements`: codes and scales; `plain_scales`: scales of
/// another layout; `amax`: tensor scales.
std::vector<uint32_t> derivedParams(const schema::QuantizedView &view);
/// For each param of a target, whether some view produces it.
std::vector<bool> derivedParams(const schema::Endpoint &endpoint);

/// The instance of another param that belongs to `instance`: a view's instance for that of a base param, or the
/// reverse.
schema::ParamInstance sibling(const schema::Endpoint &endpoint, const schema::ParamInstance &instance, uint32_t param,
                              int64_t meshRank);

/// The number of matrices that an instance of a view has, one after the other: each is quantized by itself.
int64_t matrixCount(const schema::Endpoint &endpoint, uint32_t view, uint32_t meshRank);

/// The values that a matrix of an instance of a source's view presents. `memory[i]` holds the whole instance of
/// baseParams(view)[i].
Bytes readMatrix(const schema::Endpoint &endpoint, uint32_t view, uint32_t meshRank,
                 const std::vector<const std::byte *> &memory, int64_t matrix);

/// What the base params of a view of kind `elements` must hold after values are written to it, in bands of whole rows
/// of blocks: of a large param few values need be in memory. A format with tensor scales needs one for each matrix.
class QuantizedBands {
public:
  QuantizedBands(const schema::Endpoint &endpoint, uint32_t view, uint32_t meshRank, std::vector<float> tensorScales);

  /// Takes the next band, of about `most` elements. Returns whether there is one.
  bool next(int64_t most);
  /// The band's elements in the instance: [first(), first() + count()).
  int64_t first() const { return first_; }
  int64_t count() const { return count_; }
  /// The codes of the band, whose values are given, and where they are in the param of the codes, in bytes.
  Bytes codes(const std::byte *values);
  int64_t codesAt() const { return codeBytes(first_); }
  /// After all bands: the scales, whose padding is zero, and the tensor scales.
  Bytes scales() const;
  Bytes tensorScales() const;

private:
  int64_t codeBytes(int64_t elements) const;

  const schema::Endpoint &endpoint_;
  const uint32_t view_, meshRank_;
  const QuantizedFormat &format_;
  const std::vector<float> tensorScales_;
  Bytes plainScales_;                           // for all rows of blocks
  uint64_t matrix_ = 0, row_ = 0, nextRow_ = 0; // the band begins at this row of blocks of this matrix
  int64_t first_ = 0, count_ = 0;
};

/// The contents of the base params, in the order of baseParams(view), after `values` are written to a view of kind
/// `elements` or `plain_scales`. Padding of scales is zero. A format with tensor scales needs one for each
/// matrix.
std::vector<Bytes> writeView(const schema::Endpoint &endpoint, uint32_t view, uint32_t meshRank,
                             const std::byte *values, const std::vector<float> &tensorScales);

/// The amax of contiguous elements: 0 if there are none, NaN if one is not finite.
float amaxOf(schema::DType type, const std::byte *elements, int64_t count);
/// The larger value, or NaN if one is NaN; the tensor scale for an amax.
float largerAmax(float a, float b);
float tensorScaleOf(float amax);

} // namespace reshard::verify
