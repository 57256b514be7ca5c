// Builds a table of changes (changes.h).
#pragma once

#include "kernels/conversion_kernel.h"
#include "kernels/convert_strided.h"

#include <map>
#include <tuple>
#include <vector>

namespace reshard::kernels {

/// What one launch changes, in no order: what one entry writes no other reads or writes. Addresses are of memory that
/// the device sees, those that the matrices of a change name too; nothing of them is looked at here.
class ConversionTable {
public:
  /// Shapes of `maxUnits` units (8 at least) and more are cut, since these are numbered in 32 bits.
  explicit ConversionTable(uint64_t maxUnits = uint64_t{1} << 31) : maxUnits_(maxUnits) {}

  /// What changeRows does with bytes [first, first + bytes) of a shape, numbered as they go along rows, the innermost
  /// loop fastest: whole elements, of a target that stands quantised whole blocks, or, where these have several rows,
  /// whole rows of blocks of a shape without loops. Source 0: zeros.
  void add(uint64_t target, uint64_t source, const Strided &shape, const Conversion &conversion, uint64_t first,
           uint64_t bytes);

  /// What scaleRows does with all rows of blocks.
  void addScales(const Quantized &target, uint64_t wide);

  /// What unswizzle and swizzle do, and the padding of swizzle alone.
  void addUnswizzle(const Quantized &source, uint64_t plain);
  void addSwizzle(const Quantized &target, uint64_t plain);
  void addPadding(const Quantized &target);

  /// Makes a number, fp32 at a multiple of 4, at least the largest magnitude (amax) of rows of elements; strides and
  /// rowBytes of the shape as for memory of `wide`. The elements are memory, or those of matrices that stand quantised,
  /// of which `source` is the number of the first times itemBytes(wide).
  void addAmax(uint64_t number, Format wide, uint64_t source, const Strided &shape, const Quantized *quantized);

  /// Tensor scales of nvfp4 for `matrices` matrices: of the largest of each `count` numbers.
  void addTensorScales(uint64_t target, uint64_t numbers, uint64_t count, uint64_t matrices);

  bool empty() const { return entries_.size() == 1; }
  /// Bytes that go into targets, as they go.
  uint64_t bytes() const { return bytes_; }

  /// The table in host memory, as long as nothing is added. One piece stands behind the others.
  ConversionTableView view() const {
    return {entries_.data(),  shapes_.data(),       loops_.data(),
            matrices_.data(), entries_.back().slot, static_cast<uint32_t>(entries_.size() - 1)};
  }
  const std::vector<ConversionEntry> &entries() const { return entries_; }
  const std::vector<TableShape> &shapes() const { return shapes_; }
  const std::vector<TableLoop> &loops() const { return loops_; }
  const std::vector<TableMatrices> &matrices() const { return matrices_; }

private:
  /// A piece of rows without its place, and the bytes of an element on each side and on its way.
  struct Rows {
    ConversionEntry entry;
    int64_t sourceItem, targetItem, item;
  };
  void addRows(const Rows &rows, const Strided &shape, uint64_t first, uint64_t bytes);
  void addBlocks(ConversionEntry entry, const ViewBase &to, uint64_t first, uint64_t bytes);
  uint32_t vectorOf(const Rows &rows, const Strided &shape) const;
  uint32_t widthOf(const Rows &rows, const Strided &shape, uint32_t vector, bool target) const;
  uint32_t matricesNumber(const Quantized &of, uint64_t begin);
  void addUnits(ConversionEntry entry, uint64_t units, uint64_t each);
  void append(const ConversionEntry &entry);

  std::vector<ConversionEntry> entries_{ConversionEntry{}}; // the last one ends the others
  std::vector<TableShape> shapes_;
  std::vector<TableLoop> loops_;
  std::vector<TableMatrices> matrices_;
  std::map<std::tuple<const std::byte *, const std::byte *, uint64_t>, uint32_t>
      numbers_; // of matrices, by codes, scales and begin
  uint64_t maxUnits_, bytes_ = 0;
};

} // namespace reshard::kernels
