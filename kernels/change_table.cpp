#include "kernels/change_table.h"

#include "kernels/strided.h"
#include "kernels/table.h"

#include <algorithm>
#include <cassert>

namespace reshard::kernels {

namespace {

uint64_t address(const std::byte *pointer) { return reinterpret_cast<uint64_t>(pointer); }

} // namespace

void ChangeTable::add(uint64_t target, uint64_t source, const Strided &shape, const Change &change, uint64_t first,
                      uint64_t bytes) {
  using Kind = Form::Kind;
  if (bytes == 0)
    return;
  bytes_ += bytes;
  const Form &read = change.read, &write = change.write;
  Rows rows{};
  ChangePiece &piece = rows.piece;
  piece.source = source;
  piece.target = target;
  piece.from = read ? matricesNumber(change.from->matrices, address(change.from->begin)) : 0;
  piece.reads = read.kind == Kind::elements ? Reads::elements : read.kind == Kind::codes ? Reads::codes : Reads::plain;
  piece.loads = read.kind == Kind::codes ? read.stands : read.kind == Kind::elements ? read.goes : write.goes;
  piece.writes = write.kind == Kind::elements ? Writes::quantized : Writes::plain;
  piece.stores = write.kind == Kind::plain ? read.goes : write.stands;
  // Of codes as kernels/quantized.h makes them; what is dequantised fits.
  piece.overflow =
      write.kind == Kind::cast || (read.kind == Kind::codes && change.from->matrices.format == Quantization::block_fp8)
          ? Overflow::saturate
          : Overflow::infinity;
  rows.item = static_cast<int64_t>((read ? read : write).item());
  rows.sourceItem = read.scale(rows.item);
  rows.targetItem = write.scale(rows.item);
  if (write.kind == Kind::elements) {
    piece.to = matricesNumber(change.to->matrices, address(change.to->begin));
    if (blockShape(change.to->matrices.format).rows > 1) {
      assert(shape.loopCount == 0 && !read);
      return addBlocks(piece, *change.to, first, bytes);
    }
  }
  addRows(rows, shape, first, bytes);
}

void ChangeTable::addScales(const Quantized &target, uint64_t wide) {
  Strided all;
  all.rowBytes = target.elements() * itemBytes(target.wide);
  Quantized scales = target;
  scales.codes = nullptr;
  const Shown shown{scales, nullptr};
  add(0, wide, all, {{}, {Form::Kind::elements, target.wide, Format::fp8_e4m3, 1}, nullptr, &shown}, 0, all.rowBytes);
}

/// Bytes [first, first + bytes) of one row.
void ChangeTable::addBlocks(ChangePiece piece, const Shown &to, uint64_t first, uint64_t bytes) {
  const Quantized &of = to.matrices;
  const TableMatrices &m = matrices_[piece.to];
  const uint64_t item = itemBytes(of.wide), begin = piece.target - address(to.begin) + first / item,
                 end = begin + bytes / item;
  auto blockRow = [&](uint64_t element) {
    return element / m.matrixElements * m.shape.rows +
           (element % m.matrixElements / of.columns + kFp8Block - 1) / kFp8Block;
  };
  piece.task = Task::blocks;
  piece.source += first - begin * item;
  piece.first = static_cast<uint32_t>(blockRow(begin));
  piece.units = static_cast<uint32_t>((blockRow(end) - blockRow(begin)) * m.shape.columns);
  uint32_t vector = kVector;
  while (of.columns % vector > 0)
    vector /= 2;
  piece.vector = static_cast<uint8_t>(vector);
  const uint64_t rowBytes = of.columns * item, wide = piece.source | rowBytes | vector * item,
                 codes = address(of.codes) | of.columns | vector;
  piece.sourceWidth = static_cast<uint8_t>(std::min<uint64_t>(16, wide & -wide));
  piece.targetWidth = static_cast<uint8_t>(std::min<uint64_t>(16, codes & -codes));
  append(piece);
}

/// The most elements that a lane can read at once: they lie in one row and, of matrices, in one block.
uint32_t ChangeTable::vectorOf(const Rows &rows, const Strided &shape) const {
  uint64_t bits = shape.rowBytes / static_cast<uint64_t>(rows.item) | kVector;
  if (rows.piece.reads != Reads::plain) {
    const TableMatrices &m = matrices_[rows.piece.from];
    bits |= (rows.piece.source - m.begin) / static_cast<uint64_t>(rows.sourceItem) | m.columns;
    for (size_t l = 0; l < shape.loopCount; ++l)
      bits |= static_cast<uint64_t>(shape.loops[l].sourceStride / rows.sourceItem);
  }
  return static_cast<uint32_t>(bits & -bits);
}

/// The widest access by which a side's units can be read or written.
uint32_t ChangeTable::widthOf(const Rows &rows, const Strided &shape, uint32_t vector, bool target) const {
  const ChangePiece &piece = rows.piece;
  const bool numbers =
      target ? piece.writes == Writes::quantized : piece.reads == Reads::elements; // addresses stand for numbers
  if (target ? piece.writes == Writes::largest : piece.source == 0 && !numbers)
    return 1;
  const TableMatrices *m = numbers ? &matrices_[target ? piece.to : piece.from] : nullptr;
  const uint64_t half = m && m->blockElements == kNvfp4Block ? 2 : 1; // codes in a byte
  if (m && (m->codes == 0 || vector < half))
    return 1;
  const uint64_t at = target ? piece.target : piece.source;
  uint64_t bits = (m ? m->codes + (at - m->begin) / half : at) |
                  vector * static_cast<uint64_t>(target ? rows.targetItem : rows.sourceItem) / half | 16;
  for (size_t l = 0; l < shape.loopCount; ++l)
    bits |= static_cast<uint64_t>(target ? shape.loops[l].targetStride : shape.loops[l].sourceStride) / half;
  return static_cast<uint32_t>(bits & -bits);
}

void ChangeTable::addRows(const Rows &rows, const Strided &shape, uint64_t first, uint64_t bytes) {
  const uint32_t reads = vectorOf(rows, shape), vector = rows.piece.writes == Writes::quantized ? kVector : reads;
  const uint64_t unit = vector * static_cast<uint64_t>(rows.item);
  assert(rows.piece.writes != Writes::quantized ||
         (shape.rowBytes % unit == 0 && first % unit == 0 && bytes % unit == 0));
  if (const uint64_t head = std::min((unit - first % unit) % unit, bytes), tail = (bytes - head) % unit;
      head > 0 || tail > 0) {
    // What begins or ends within a unit goes element by element.
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
                       if (rows.piece.source || rows.piece.reads == Reads::elements)
                         part.piece.source +=
                             static_cast<uint64_t>(rowBytes / rows.item * rows.sourceItem + steps * outer.sourceStride);
                       if (rows.piece.writes != Writes::largest)
                         part.piece.target +=
                             static_cast<uint64_t>(rowBytes / rows.item * rows.targetItem + steps * outer.targetStride);
                       addRows(part, half, begin, some);
                     });
  ChangePiece piece = rows.piece;
  piece.task = Task::rows;
  piece.first = static_cast<uint32_t>(first / unit);
  piece.units = static_cast<uint32_t>(bytes / unit);
  piece.vector = static_cast<uint8_t>(vector);
  piece.sourceVector = static_cast<uint8_t>(reads == vector ? vector : 1);
  piece.sourceWidth = static_cast<uint8_t>(widthOf(rows, shape, piece.sourceVector, false));
  piece.targetWidth = static_cast<uint8_t>(widthOf(rows, shape, vector, true));
  piece.shape = shapeNumber(shapes_, loops_, shape, shape.rowBytes / unit);
  append(piece);
}

void ChangeTable::addUnswizzle(const Quantized &source, uint64_t plain) {
  ChangePiece piece{};
  piece.target = plain;
  piece.task = Task::unswizzle;
  piece.to = matricesNumber(source, 0);
  const ScaleShape &shape = matrices_[piece.to].shape;
  addUnits(piece, source.matrices, shape.rows * shape.columns);
}

void ChangeTable::addSwizzle(const Quantized &target, uint64_t plain) {
  ChangePiece piece{};
  piece.source = plain;
  piece.task = Task::swizzle;
  piece.to = matricesNumber(target, 0);
  addUnits(piece, target.matrices, target.scaleBytes());
}

void ChangeTable::addPadding(const Quantized &target) {
  ChangePiece piece{};
  piece.task = Task::padding;
  piece.to = matricesNumber(target, 0);
  addUnits(piece, target.matrices, target.scaleBytes());
}

/// Units of matrices, `each` of one; scales are bytes, so they are fewer than 2^32 where their memory is less than 4
/// GiB.
void ChangeTable::addUnits(ChangePiece piece, uint64_t matrices, uint64_t each) {
  assert(matrices * each < uint64_t{1} << 32);
  piece.units = static_cast<uint32_t>(matrices * each);
  append(piece);
}

void ChangeTable::addLargest(uint64_t number, Format wide, uint64_t source, const Strided &shape,
                             const Quantized *quantized) {
  Rows rows{};
  rows.piece.target = number;
  rows.piece.source = source;
  rows.piece.loads = rows.piece.stores = wide;
  rows.piece.writes = Writes::largest;
  rows.item = rows.sourceItem = rows.targetItem = static_cast<int64_t>(itemBytes(wide));
  Strided elements = shape;
  if (quantized) {
    rows.piece.reads = Reads::elements;
    rows.piece.from = matricesNumber(*quantized, 0);
    rows.piece.source /= static_cast<uint64_t>(rows.item);
    rows.sourceItem = 1;
    for (size_t l = 0; l < shape.loopCount; ++l)
      elements.loops[l].sourceStride /= rows.item;
  }
  if (shape.bytes() > 0)
    addRows(rows, elements, 0, shape.bytes());
}

void ChangeTable::addTensorScales(uint64_t target, uint64_t numbers, uint64_t count, uint64_t matrices) {
  ChangePiece piece{};
  piece.task = Task::tensorScales;
  piece.source = numbers;
  piece.target = target;
  piece.first = static_cast<uint32_t>(count);
  addUnits(piece, matrices, 1);
}

uint32_t ChangeTable::matricesNumber(const Quantized &of, uint64_t begin) {
  const auto [at, added] = numbers_.try_emplace({of.codes, of.scales, begin}, static_cast<uint32_t>(matrices_.size()));
  if (added) {
    const BlockShape block = blockShape(of.format);
    TableMatrices &m = matrices_.emplace_back();
    m.begin = begin;
    m.codes = address(of.codes);
    m.scales = address(of.scales);
    m.tensorScales = address(of.tensorScales);
    m.rows = of.rows;
    m.columns = of.columns;
    m.matrixElements = of.rows * of.columns;
    m.scaleBytes = of.scaleBytes();
    m.shape = {(of.rows + block.rows - 1) / block.rows, (of.columns + block.columns - 1) / block.columns};
    m.wide = of.wide;
    m.blockElements = static_cast<uint8_t>(block.rows > 1 ? 0 : block.columns);
    m.swizzled = of.swizzled;
  }
  return at->second;
}

void ChangeTable::append(const ChangePiece &piece) {
  const uint64_t slot = pieces_.back().slot;
  if (piece.units == 0)
    return;
  pieces_.back() = piece;
  pieces_.back().slot = slot;
  pieces_.push_back({});
  pieces_.back().slot = slot + tilesOf(piece);
}

} // namespace reshard::kernels
