// SPDX-License-Identifier: Apache-2.0
// Divides the conversions of a batch into entries of equal units of work, with the widest memory access that both sides
// allow.
#include "kernels/gpu/conversion_table.h"

#include "kernels/gpu/copy_table.h"
#include "kernels/kernels.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace reshard::kernels {

namespace {

uint64_t address(const std::byte *pointer) { return reinterpret_cast<uint64_t>(pointer); }

/// Blocks of several rows are rows of their own in the table; others begin and end within a tile.
constexpr bool blocksAreSupported() {
  for (const QuantizedFormat &format : kQuantizedFormats)
    if (!std::has_single_bit(static_cast<uint64_t>(format.blockRows)) ||
        !std::has_single_bit(static_cast<uint64_t>(format.blockColumns)) || format.blockColumns < kVector ||
        (format.blockRows == 1 && format.blockColumns > kWarpThreads * kVector))
      return false;
  return true;
}
static_assert(blocksAreSupported(), "the table stores the logarithms of block shapes; a warp has all of a row's block");

} // namespace

void ConversionTable::add(uint64_t target, uint64_t source, const Strided &shape, const Conversion &conversion,
                          ByteRange range) {
  const auto [first, bytes] = range;
  using Kind = StorageForm::Kind;
  if (bytes == 0)
    return;
  bytes_ += bytes;
  const StorageForm &read = conversion.read, &write = conversion.write;
  Rows rows{};
  ConversionEntry &entry = rows.entry;
  entry.source = source;
  entry.target = target;
  entry.from = read ? matricesNumber(conversion.from->matrices, address(conversion.from->begin)) : 0;
  entry.reads = read.kind == Kind::elements ? Reads::elements : read.kind == Kind::codes ? Reads::codes : Reads::plain;
  entry.loads = read.kind == Kind::codes ? read.stored : read.kind == Kind::elements ? read.sent : write.sent;
  entry.writes = write.kind == Kind::elements ? Writes::quantized : Writes::plain;
  entry.stores = write.kind == Kind::plain ? read.sent : write.stored;
  // Quantized codes overflow as kernels/cpu/quantized.h defines.
  entry.overflow = write.kind == Kind::cast ? written(write.overflow)
                   : read.kind == Kind::codes && blockShape(conversion.from->matrices.format).rows > 1
                       ? Overflow::saturate
                       : Overflow::infinity;
  entry.overflowed = reinterpret_cast<uint64_t>(write.overflowed);
  rows.item = static_cast<int64_t>((read ? read : write).item());
  rows.sourceItem = read.scale(rows.item);
  rows.targetItem = write.scale(rows.item);
  if (write.kind == Kind::elements) {
    entry.to = matricesNumber(conversion.to->matrices, address(conversion.to->begin));
    if (blockShape(conversion.to->matrices.format).rows > 1) {
      assert(shape.loopCount == 0 && !read);
      return addBlocks(entry, *conversion.to, first, bytes);
    }
  }
  addRows(rows, shape, first, bytes);
}

void ConversionTable::addScales(const Quantized &target, uint64_t wide) {
  Strided all;
  all.rowBytes = target.elements() * itemBytes(target.wide);
  Quantized scales = target;
  scales.codes = nullptr;
  const ViewBase base{scales, nullptr};
  add(0, wide, all, {{}, {StorageForm::Kind::elements, target.wide, NumberFormat::fp8_e4m3, 1}, nullptr, &base},
      {0, all.rowBytes});
}

/// Adds blocks of several rows: bytes [first, first + bytes) of one row.
void ConversionTable::addBlocks(ConversionEntry entry, const ViewBase &to, uint64_t first, uint64_t bytes) {
  const Quantized &of = to.matrices;
  const TableMatrices &m = matrices_[entry.to];
  const uint64_t item = itemBytes(of.wide), begin = entry.target - address(to.begin) + first / item,
                 end = begin + bytes / item;
  auto blockRow = [&](uint64_t element) {
    return element / m.matrixElements * m.shape.rows +
           (element % m.matrixElements / of.columns + m.shape.blockRows - 1) / m.shape.blockRows;
  };
  entry.task = Task::blocks;
  entry.source += first - begin * item;
  entry.first = static_cast<uint32_t>(blockRow(begin));
  entry.units = static_cast<uint32_t>((blockRow(end) - blockRow(begin)) * m.shape.columns);
  uint32_t vector = kVector;
  while (of.columns % vector > 0)
    vector /= 2;
  entry.vector = static_cast<uint8_t>(vector);
  const uint64_t rowBytes = of.columns * item, wide = entry.source | rowBytes | vector * item,
                 codes = address(of.codes) | of.columns | vector;
  entry.sourceWidth = static_cast<uint8_t>(std::min<uint64_t>(16, wide & -wide));
  entry.targetWidth = static_cast<uint8_t>(std::min<uint64_t>(16, codes & -codes));
  append(entry);
}

/// Returns the largest number of elements that a lane can read at once: they are in one row and in one block.
uint32_t ConversionTable::vectorOf(const Rows &rows, const Strided &shape) const {
  uint64_t bits = shape.rowBytes / static_cast<uint64_t>(rows.item) | kVector;
  if (rows.entry.reads != Reads::plain) {
    const TableMatrices &m = matrices_[rows.entry.from];
    bits |= (rows.entry.source - m.begin) / static_cast<uint64_t>(rows.sourceItem) | m.columns;
    for (size_t l = 0; l < shape.loopCount; ++l)
      bits |= static_cast<uint64_t>(shape.loops[l].sourceStride / rows.sourceItem);
  }
  return static_cast<uint32_t>(bits & -bits);
}

/// Returns the widest access, in bytes, by which one side's units can be read or written.
uint32_t ConversionTable::widthOf(const Rows &rows, const Strided &shape, uint32_t vector, bool target) const {
  const ConversionEntry &entry = rows.entry;
  const bool numbers =
      target ? entry.writes == Writes::quantized : entry.reads == Reads::elements; // addresses encode indices
  if (target ? entry.writes == Writes::amax : entry.source == 0 && !numbers)
    return 1;
  const TableMatrices *m = numbers ? &matrices_[target ? entry.to : entry.from] : nullptr;
  const uint64_t half = m ? m->codesPerByte() : 1;
  if (m && (m->codes == 0 || vector < half))
    return 1;
  const uint64_t at = target ? entry.target : entry.source;
  uint64_t bits = (m ? m->codes + (at - m->begin) / half : at) |
                  vector * static_cast<uint64_t>(target ? rows.targetItem : rows.sourceItem) / half | 16;
  for (size_t l = 0; l < shape.loopCount; ++l)
    bits |= static_cast<uint64_t>(target ? shape.loops[l].targetStride : shape.loops[l].sourceStride) / half;
  return static_cast<uint32_t>(bits & -bits);
}

void ConversionTable::addRows(const Rows &rows, const Strided &shape, uint64_t first, uint64_t bytes) {
  const uint32_t reads = vectorOf(rows, shape), vector = rows.entry.writes == Writes::quantized ? kVector : reads;
  const uint64_t unit = vector * static_cast<uint64_t>(rows.item);
  assert(rows.entry.writes != Writes::quantized ||
         (shape.rowBytes % unit == 0 && first % unit == 0 && bytes % unit == 0));
  if (const uint64_t head = std::min((unit - first % unit) % unit, bytes), tail = (bytes - head) % unit;
      head > 0 || tail > 0) {
    // A range that begins or ends within a unit is converted element by element.
    Strided elements = shape; // each a row
    elements.rowBytes = static_cast<uint64_t>(rows.item);
    if (const uint64_t each = shape.rowBytes / elements.rowBytes; each > 1) {
      assert(elements.loopCount < kMaxLoops);
      elements.loops[elements.loopCount++] = {each, rows.sourceItem, rows.targetItem};
    }
    for (const auto &[at, some] : {std::pair(first, head), std::pair(first + bytes - tail, tail)})
      if (some > 0)
        addRows(rows, elements, at, some);
    if (bytes > head + tail)
      addRows(rows, shape, first + head, bytes - head - tail);
    return;
  }
  if (shape.bytes() / unit >= maxUnits_)
    return forHalves(shape, kMxBlock / kVector * unit, first, bytes,
                     [&](const Strided &half, int64_t rowBytes, int64_t steps, uint64_t begin, uint64_t some) {
                       Rows part = rows;
                       const Loop outer = steps > 0 ? shape.loops[0] : Loop{1, 0, 0};
                       if (rows.entry.source || rows.entry.reads == Reads::elements)
                         part.entry.source +=
                             static_cast<uint64_t>(rowBytes / rows.item * rows.sourceItem + steps * outer.sourceStride);
                       if (rows.entry.writes != Writes::amax)
                         part.entry.target +=
                             static_cast<uint64_t>(rowBytes / rows.item * rows.targetItem + steps * outer.targetStride);
                       addRows(part, half, begin, some);
                     });
  ConversionEntry entry = rows.entry;
  entry.task = Task::rows;
  entry.first = static_cast<uint32_t>(first / unit);
  entry.units = static_cast<uint32_t>(bytes / unit);
  entry.vector = static_cast<uint8_t>(vector);
  entry.sourceVector = static_cast<uint8_t>(reads == vector ? vector : 1);
  entry.sourceWidth = static_cast<uint8_t>(widthOf(rows, shape, entry.sourceVector, false));
  entry.targetWidth = static_cast<uint8_t>(widthOf(rows, shape, vector, true));
  entry.shape = shapeNumber(shapes_, loops_, shape, shape.rowBytes / unit);
  append(entry);
}

void ConversionTable::addToPlain(const Quantized &source, uint64_t plain) {
  ConversionEntry entry{};
  entry.target = plain;
  entry.task = Task::toPlain;
  entry.to = matricesNumber(source, 0);
  const ScaleShape &shape = matrices_[entry.to].shape;
  addUnits(entry, source.matrices, shape.rows * shape.columns);
}

void ConversionTable::addFromPlain(const Quantized &target, uint64_t plain) {
  ConversionEntry entry{};
  entry.source = plain;
  entry.task = Task::fromPlain;
  entry.to = matricesNumber(target, 0);
  addUnits(entry, target.matrices, target.scaleBytes());
}

void ConversionTable::addPadding(const Quantized &target) {
  ConversionEntry entry{};
  entry.task = Task::padding;
  entry.to = matricesNumber(target, 0);
  addUnits(entry, target.matrices, target.scaleBytes());
}

/// Adds an entry of `each` units for every matrix. Units are bytes of scales, so there are fewer than 2^32 of them if
/// the scales are less than 4 GiB.
void ConversionTable::addUnits(ConversionEntry entry, uint64_t matrices, uint64_t each) {
  assert(matrices * each < uint64_t{1} << 32);
  entry.units = static_cast<uint32_t>(matrices * each);
  append(entry);
}

void ConversionTable::addAmax(uint64_t number, NumberFormat wide, uint64_t source, const Strided &shape,
                              const Quantized *quantized) {
  Rows rows{};
  rows.entry.target = number;
  rows.entry.source = source;
  rows.entry.loads = rows.entry.stores = wide;
  rows.entry.writes = Writes::amax;
  rows.item = rows.sourceItem = rows.targetItem = static_cast<int64_t>(itemBytes(wide));
  Strided elements = shape;
  if (quantized) {
    rows.entry.reads = Reads::elements;
    rows.entry.from = matricesNumber(*quantized, 0);
    rows.entry.source /= static_cast<uint64_t>(rows.item);
    rows.sourceItem = 1;
    for (size_t l = 0; l < shape.loopCount; ++l)
      elements.loops[l].sourceStride /= rows.item;
  }
  if (shape.bytes() > 0)
    addRows(rows, elements, 0, shape.bytes());
}

void ConversionTable::addTensorScales(uint64_t target, uint64_t numbers, uint64_t count, uint64_t matrices) {
  ConversionEntry entry{};
  entry.task = Task::tensorScales;
  entry.source = numbers;
  entry.target = target;
  entry.first = static_cast<uint32_t>(count);
  addUnits(entry, matrices, 1);
}

uint32_t ConversionTable::matricesNumber(const Quantized &of, uint64_t begin) {
  const auto [at, added] = numbers_.try_emplace({of.codes, of.scales, begin}, static_cast<uint32_t>(matrices_.size()));
  if (added) {
    const QuantizedFormat &format = formatOf(of.format);
    TableMatrices &m = matrices_.emplace_back();
    m.begin = begin;
    m.codes = address(of.codes);
    m.scales = address(of.scales);
    m.tensorScales = address(of.tensorScales);
    m.rows = of.rows;
    m.columns = of.columns;
    m.matrixElements = of.rows * of.columns;
    m.scaleBytes = of.scaleBytes();
    m.shape = of.scaleShape();
    m.rowBits = static_cast<uint8_t>(std::countr_zero(static_cast<uint64_t>(format.blockRows)));
    m.columnBits = static_cast<uint8_t>(std::countr_zero(static_cast<uint64_t>(format.blockColumns)));
    m.wide = of.wide;
    m.code = numberFormat(format.code);
    m.scale = format.scale;
    m.layout = of.layout;
  }
  return at->second;
}

void ConversionTable::append(const ConversionEntry &entry) {
  const uint64_t slot = entries_.back().slot;
  if (entry.units == 0)
    return;
  entries_.back() = entry;
  entries_.back().slot = slot;
  entries_.push_back({});
  entries_.back().slot = slot + tilesOf(entry);
}

} // namespace reshard::kernels
