// Blocks of quantised params as positions of layouts: a tensor of scales has a position for each block.
#pragma once

#include "ir/ir.h"

#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace reshard {

/// Rows and columns of a block; dtypes of codes and scales.
struct BlockSize {
  int64_t rows, columns;
};
BlockSize blockOf(ir::Quantization format);
ir::DType codeType(ir::Quantization format);
ir::DType scaleType(ir::Quantization format);

/// An extent with each length changed.
template <class Change> ir::Extent mapped(ir::Extent extent, Change change) {
  for (int64_t &length : extent.at)
    length = change(length);
  return extent;
}

/// The local shape of the scales of a param of this shape, plain or swizzled (docs/yaml.md).
std::vector<ir::Extent> scaleShape(std::vector<ir::Extent> shape, ir::Quantization format);
std::vector<ir::Extent> swizzledShape(const ir::Endpoint &endpoint, std::vector<ir::Extent> shape,
                                      ir::Quantization format);

/// Parts of codes and scales for parts of params.
class Blocks {
public:
  explicit Blocks(ir::Layout &layout) : layout_(layout) {}

  /// Appends the part of the codes and that of the scales of part `part` of a param; each block must be whole there,
  /// and of one tensor. Otherwise says why not. Parts are of the same tensors where they have the same blocks.
  std::string parts(unsigned endpoint, unsigned param, unsigned part, ir::Quantization format,
                    std::vector<ir::Part> &codes, std::vector<ir::Part> &scales);

  /// The part of the tensor scales of a part, one for each matrix. All that the matrix holds must have one.
  ir::Part tensorScales(unsigned endpoint, unsigned param, unsigned part);

private:
  /// A tensor, and the dimensions of it that blocks run along; -1 where they are of one row.
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
  std::map<Blocked, std::pair<int, int>> quantizedPatterns_; // those of codes and scales
  std::map<int, int> tensorScales_;
  std::map<std::tuple<unsigned, unsigned, int64_t, int64_t>, unsigned> divided_;
};

} // namespace reshard
