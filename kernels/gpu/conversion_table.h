// SPDX-License-Identifier: Apache-2.0
// Builds a table of conversions (conversion_kernel.h).
#pragma once

#include "kernels/cpu/convert_strided.h"
#include "kernels/gpu/conversion_kernel.h"

#include <map>
#include <tuple>
#include <vector>

namespace reshard::kernels {

/// Bytes [first, first + bytes) of a shape, numbered along rows, the innermost loop fastest.
struct ByteRange {
  uint64_t first, bytes;
};

/// The conversions of one launch. They run in any order: no entry may read or write what another entry writes. All
/// addresses, including those in the matrices of a conversion, are device addresses; this class does not dereference
/// them.
class ConversionTable {
public:
  /// Shapes of `maxUnits` units (at least 8) or more are split, because units are numbered in 32 bits.
  explicit ConversionTable(uint64_t maxUnits = uint64_t{1} << 31) : maxUnits_(maxUnits) {}

  /// Adds what convertRows does with a range of a shape. The range must be whole elements; for a quantized target,
  /// whole blocks; for blocks of several rows, whole rows of blocks of a shape without loops. Source 0 means zeros.
  void add(uint64_t target, uint64_t source, const Strided &shape, const Conversion &conversion, ByteRange range);

  /// Adds the computation of all scales of `target` from elements at `wide`; its codes are not written.
  void addScales(const Quantized &target, uint64_t wide);

  /// Adds what toPlainScales, fromPlainScales and clearScalePadding do.
  void addToPlain(const Quantized &source, uint64_t plain);
  void addFromPlain(const Quantized &target, uint64_t plain);
  void addPadding(const Quantized &target);

  /// Adds an amax: raises the fp32 number at address `number` (a multiple of 4) to at least the amax of the elements.
  /// Strides and rowBytes of the shape are those of memory in the format `wide`. The elements are in memory, or, if
  /// `quantized` is given, they are those of quantized matrices; `source` is then the index of the first element times
  /// itemBytes(wide).
  void addAmax(uint64_t number, NumberFormat wide, uint64_t source, const Strided &shape, const Quantized *quantized);

  /// Adds the nvfp4 tensor scales of `matrices` matrices, each from the maximum of `count` amax values.
  void addTensorScales(uint64_t target, uint64_t numbers, uint64_t count, uint64_t matrices);

  bool empty() const { return entries_.size() == 1; }
  /// Bytes that all entries write, counted as sent.
  uint64_t bytes() const { return bytes_; }

  /// The table in host memory; valid until the next add. A sentinel entry follows the last one.
  ConversionTableView view() const {
    return {entries_.data(),  shapes_.data(),       loops_.data(),
            matrices_.data(), entries_.back().slot, static_cast<uint32_t>(entries_.size() - 1)};
  }
  const std::vector<ConversionEntry> &entries() const { return entries_; }
  const std::vector<TableShape> &shapes() const { return shapes_; }
  const std::vector<TableLoop> &loops() const { return loops_; }
  const std::vector<TableMatrices> &matrices() const { return matrices_; }

private:
  /// An entry of rows before its range is known, and the bytes of an element in the source, in the target, and as sent.
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

  std::vector<ConversionEntry> entries_{ConversionEntry{}}; // the last one is the sentinel
  std::vector<TableShape> shapes_;
  std::vector<TableLoop> loops_;
  std::vector<TableMatrices> matrices_;
  std::map<std::tuple<const std::byte *, const std::byte *, uint64_t>, uint32_t>
      numbers_; // indices in matrices_, by codes, scales and begin
  uint64_t maxUnits_, bytes_ = 0;
};

} // namespace reshard::kernels
