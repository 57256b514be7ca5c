// Parts of codes and scales for quantized params: a tensor of scales has a position for each block.
#pragma once

#include "ir/ir.h"

#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace reshard {

/// Rows and columns of a format's block.
struct BlockSize {
  int64_t rows, columns;
};
BlockSize blockOf(ir::Quantization format);
ir::DType codeType(ir::Quantization format);
ir::DType scaleType(ir::Quantization format);

/// Applies `change` to each length of an extent.
template <class Change> ir::Extent mapped(ir::Extent extent, Change change) {
  for (int64_t &length : extent.at)
    length = change(length);
  return extent;
}

/// The local shape of the scales of a param of this shape, plain or swizzled (docs/yaml.md).
std::vector<ir::Extent> scaleShape(std::vector<ir::Extent> shape, ir::Quantization format);
std::vector<ir::Extent> swizzledShape(const ir::Endpoint &endpoint, std::vector<ir::Extent> shape,
                                      ir::Quantization format);

/// Makes parts of codes and scales from parts of params.
class Blocks {
public:
  explicit Blocks(ir::Layout &layout) : layout_(layout) {}

  /// Appends the parts of codes and of scales for part `part` of a param. Each block must be complete there and of one
  /// tensor; else returns an error text. Parts with the same blocks have the same tensors of codes and scales.
  std::string parts(unsigned endpoint, unsigned param, unsigned part, ir::Quantization format,
                    std::vector<ir::Part> &codes, std::vector<ir::Part> &scales);

  /// The part of the tensor scales of a part, one for each matrix. All tensors in the matrix must have the same one.
  ir::Part tensorScales(unsigned endpoint, unsigned param, unsigned part);

private:
  /// A tensor and its dimensions that are the columns and rows of blocks; -1 if blocks have one row.
  struct Blocked {
    int pattern;
    ir::Quantization format;
    int columns, rows;
    auto operator<=>(const Blocked &) const = default;
  };
  std::pair<int, int> quantizedPatterns(const Blocked &blocked);
  bool divide(unsigned endpoint, unsigned sharding, int64_t block, int64_t length, const ir::Extent &extent,
              unsigned &divided);

  ir::Layout &layout_;
  std::map<Blocked, std::pair<int, int>> quantizedPatterns_; // patterns of codes and scales
  std::map<int, int> tensorScales_;
  std::map<std::tuple<unsigned, unsigned, int64_t, int64_t>, unsigned> divided_;
};

} // namespace reshard
