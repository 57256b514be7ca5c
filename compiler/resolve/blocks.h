// SPDX-License-Identifier: Apache-2.0
// Parts of codes and scales for quantized params: a tensor of scales has a position for each block.
#pragma once

#include "ir/ir.h"

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace reshard {

ir::DType codeType(ir::Quantization format);
ir::DType scaleType(ir::Quantization format, ir::ScaleLayout layout = ir::ScaleLayout::plain);

/// Applies `change` to each length of an extent.
template <class Change> ir::Extent mapped(ir::Extent extent, Change change) {
  for (int64_t &length : extent.at)
    length = change(length);
  return extent;
}

/// The local shape of the scales of a param of this shape, in a layout.
std::vector<ir::Extent> scaleShape(const ir::Endpoint &endpoint, std::vector<ir::Extent> shape, ir::Quantization format,
                                   ir::ScaleLayout layout = ir::ScaleLayout::plain);

/// A part of a param of an endpoint, by numbers.
struct PartNumber {
  unsigned endpoint, param, part;
};

/// Parts of the params of codes and of scales.
struct QuantizedParts {
  std::vector<ir::Part> codes, scales;
};

/// Makes parts of codes and scales from parts of params.
class Blocks {
public:
  explicit Blocks(ir::Layout &layout) : layout_(layout) {}

  /// Appends the parts of codes and of scales for a part. Each block must be complete there and of one tensor; else
  /// returns an error text. Parts with the same blocks have the same tensors of codes and scales.
  std::string parts(const PartNumber &of, ir::Quantization format, QuantizedParts &quantized);

  /// The part of the tensor scales of a part, one for each matrix. All tensors in the matrix must have the same one.
  ir::Part tensorScales(const PartNumber &of);

private:
  /// A tensor and its dimensions that are the columns and rows of blocks; -1 if blocks have one row.
  struct Blocked {
    int pattern;
    ir::Quantization format;
    int columns, rows;
    auto operator<=>(const Blocked &) const = default;
  };
  std::pair<int, int> quantizedPatterns(const Blocked &blocked);
  /// A sharding of an endpoint whose positions become numbers of blocks. `length` of the tensor's dimension; -1 for
  /// padding, where only local positions matter. `extent` of the param's dimension.
  struct Division {
    unsigned endpoint, sharding;
    int64_t block, length;
    const ir::Extent &extent;
  };
  std::optional<unsigned> divide(const Division &division);
  std::string padding(const PartNumber &of, const QuantizedFormat &format, QuantizedParts &quantized);

  ir::Layout &layout_;
  std::map<Blocked, std::pair<int, int>> quantizedPatterns_; // patterns of codes and scales
  std::map<int, int> tensorScales_;
  std::map<std::tuple<unsigned, unsigned, int64_t, int64_t>, unsigned> divided_;
};

} // namespace reshard
