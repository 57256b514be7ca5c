// SPDX-License-Identifier: Apache-2.0
// Divides a range of elements into parts of whole blocks within one matrix, and treats the blocks that the range splits
// apart.
#include "kernels/cpu/quantized.h"

#include "kernels/scales.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace reshard::kernels {

namespace {

/// Scales that are copied to a buffer at a time if they are not in the plain layout.
constexpr uint64_t kScratch = 1024;

/// The largest block that lies in one row.
constexpr uint64_t largestRowBlock() {
  uint64_t largest = 0;
  for (const QuantizedFormat &format : kQuantizedFormats)
    if (format.blockRows == 1)
      largest = std::max(largest, static_cast<uint64_t>(format.blockColumns));
  return largest;
}
constexpr uint64_t kLargestRowBlock = largestRowBlock();

bool blocksInRows(const Quantized &of) { return formatOf(of.format).blockRows == 1; }

float tensorScale(const Quantized &of, uint64_t element) {
  float scale = 1;
  if (formatOf(of.format).rule == ScaleRule::tensorQuotient)
    std::memcpy(&scale, of.tensorScales + element / (of.rows * of.columns) * sizeof(scale), sizeof(scale));
  return scale;
}

std::byte *codesAt(const Quantized &of, uint64_t element) {
  return of.codes + (formatOf(of.format).codesPerByte() == 2 ? element / 2 : element);
}

/// Returns the scales of a matrix whose scales have one byte.
ScaleMatrix scalesOf(const Quantized &of, uint64_t matrix) {
  return {of.scales + matrix * of.scaleBytes(), of.layout, of.scaleShape()};
}

enum class ScaleAccess { read, write };

/// Calls visit(first block, count, their scales, contiguous) for parts of blocks [first, first + count), numbered row
/// by row. A part lies in one matrix and, if blocks have several rows, in one row of blocks. Scales that are not in the
/// plain layout are copied to a buffer and back: as many whole rows as fit, or parts of longer rows.
template <ScaleAccess kAccess, class Visit>
void forBlocks(const Quantized &of, uint64_t first, uint64_t count, const Visit &visit) {
  const ScaleShape shape = of.scaleShape();
  const uint64_t ofMatrix = shape.rows * shape.columns, end = first + count;
  const auto item = static_cast<uint64_t>(formatOf(of.format).scaleBytes());
  std::byte scratch[kScratch];
  while (first < end) {
    const uint64_t matrix = first / ofMatrix, inMatrix = first % ofMatrix;
    const uint64_t contiguous = blocksInRows(of) ? ofMatrix - inMatrix : shape.columns - inMatrix % shape.columns;
    uint64_t blocks = std::min(end - first, contiguous);
    if (of.layout == ScaleLayout::plain) {
      visit(first, blocks, of.scales + first * item);
    } else {
      blocks = std::min(blocks, kScratch);
      ScaleSlice slice = {inMatrix / shape.columns, inMatrix % shape.columns, 1, 0};
      slice.columns = std::min(blocks, shape.columns - slice.column);
      if (slice.columns == shape.columns)
        slice.rows = blocks / shape.columns;
      blocks = slice.rows * slice.columns;
      const auto stride = static_cast<int64_t>(slice.columns);
      if (kAccess == ScaleAccess::read)
        readScales(scratch, stride, scalesOf(of, matrix), slice);
      visit(first, blocks, scratch);
      if (kAccess == ScaleAccess::write)
        writeScales(scalesOf(of, matrix), slice, scratch, stride);
    }
    first += blocks;
  }
}

/// The elements of a part that forBlocks visits: the number of the first one, and their matrix.
struct BlockPart {
  uint64_t element;
  BlockMatrix matrix;
};
BlockPart partOf(const Quantized &of, uint64_t block, uint64_t blocks, std::byte *scales) {
  const BlockShape size = blockShape(of.format);
  BlockPart part{block * size.columns, {of.format, of.wide, 1, blocks * size.columns, 0, 0, nullptr, scales}};
  if (!blocksInRows(of)) {
    const ScaleShape shape = of.scaleShape();
    const uint64_t blockRow = block / shape.columns, row = blockRow % shape.rows * size.rows,
                   column = block % shape.columns * size.columns;
    part.element = (blockRow / shape.rows * of.rows + row) * of.columns + column;
    part.matrix.rows = std::min(size.rows, of.rows - row);
    part.matrix.columns = std::min(blocks * size.columns, of.columns - column);
    part.matrix.wideStride = static_cast<int64_t>(of.columns * itemBytes(of.wide));
    part.matrix.codeStride = static_cast<int64_t>(of.columns);
  }
  part.matrix.codes = codesAt(of, part.element);
  part.matrix.tensorScale = tensorScale(of, part.element);
  return part;
}

/// Elements [first, end) of one row of blocks; `scales` begins with that of the first element's block.
struct RowPart {
  uint64_t first, end;
  std::byte *scales;
};

/// Calls step(part) for a part that begins `skipped` elements after the begin of a block: once for the rest of that
/// block, and once for all others together.
template <class Step>
void splitFirstBlock(const Quantized &of, const RowPart &part, uint64_t skipped, const Step &step) {
  if (skipped == 0)
    return step(part);
  const uint64_t cut = std::min(part.first + blockShape(of.format).columns - skipped, part.end);
  step(RowPart{part.first, cut, part.scales});
  if (cut < part.end)
    step(RowPart{cut, part.end, part.scales + formatOf(of.format).scaleBytes()});
}

/// Calls splitFirstBlock for parts of elements [first, end): parts of one matrix, or, if blocks have several rows, of
/// one row.
template <class Step> void forElements(const Quantized &of, uint64_t first, uint64_t end, const Step &step) {
  const BlockShape block = blockShape(of.format);
  if (first == end)
    return;
  if (blocksInRows(of))
    return forBlocks<ScaleAccess::read>(of, divide(first, block.columns),
                                        divideUp(end, block.columns) - divide(first, block.columns),
                                        [&](uint64_t index, uint64_t blocks, std::byte *scales) {
                                          const uint64_t from = std::max(first, index * block.columns),
                                                         to = std::min(end, (index + blocks) * block.columns);
                                          splitFirstBlock(of, {from, to, scales}, from & (block.columns - 1), step);
                                        });
  const ScaleShape shape = of.scaleShape();
  while (first < end) {
    const uint64_t row = first / of.columns, begin = row * of.columns, next = std::min(end, begin + of.columns);
    const uint64_t blockRow = row / of.rows * shape.rows + divide(row % of.rows, block.rows);
    const uint64_t left = divide(first - begin, block.columns), right = divideUp(next - begin, block.columns);
    forBlocks<ScaleAccess::read>(
        of, blockRow * shape.columns + left, right - left, [&](uint64_t index, uint64_t blocks, std::byte *scales) {
          const uint64_t column = index % shape.columns * block.columns, from = std::max(first, begin + column),
                         to = std::min(next, begin + column + blocks * block.columns);
          splitFirstBlock(of, {from, to, scales}, from - begin - column, step);
        });
    first = next;
  }
}

/// The elements of a part as a matrix of one row.
BlockMatrix matrixOf(const Quantized &of, const RowPart &part, std::byte *codes) {
  return {of.format, of.wide, 1, part.end - part.first, 0, 0, codes, part.scales, tensorScale(of, part.first)};
}

} // namespace

uint64_t Quantized::scaleBytes() const {
  return storedScales(layout, scaleShape()) * static_cast<uint64_t>(formatOf(format).scaleBytes());
}

void quantizeRows(const Quantized &target, const std::byte *wide, uint64_t first, uint64_t count,
                  const ConvertOptions &how) {
  const uint64_t columns = target.scaleShape().columns;
  forBlocks<ScaleAccess::write>(target, first * columns, count * columns,
                                [&](uint64_t index, uint64_t blocks, std::byte *scales) {
                                  const BlockPart part = partOf(target, index, blocks, scales);
                                  quantize(part.matrix, wide + part.element * itemBytes(target.wide), how);
                                });
}

void scaleRows(const Quantized &target, const std::byte *wide, uint64_t first, uint64_t count,
               const ConvertOptions &how) {
  const uint64_t columns = target.scaleShape().columns;
  forBlocks<ScaleAccess::write>(target, first * columns, count * columns,
                                [&](uint64_t index, uint64_t blocks, std::byte *scales) {
                                  const BlockPart part = partOf(target, index, blocks, scales);
                                  computeScales(part.matrix, wide + part.element * itemBytes(target.wide), how);
                                });
}

void quantizeBlocks(const Quantized &target, ElementSpan span, const std::byte *wide, const ConvertOptions &how) {
  const uint64_t block = blockShape(target.format).columns, first = span.first;
  assert(blocksInRows(target) && first % block == 0 && span.count % block == 0);
  forBlocks<ScaleAccess::write>(
      target, divide(first, block), divide(span.count, block), [&](uint64_t index, uint64_t blocks, std::byte *scales) {
        BlockPart part = partOf(target, index, blocks, scales);
        if (wide)
          return quantize(part.matrix, wide + (part.element - first) * itemBytes(target.wide), how);
        // All blocks of zeros are equal, and all bytes of their codes are equal, so one block is quantized and
        // repeated. Its scale is computed, because a NaN tensor scale makes it NaN.
        constexpr std::byte kZeros[kLargestRowBlock * sizeof(float)] = {};
        const auto scaleBytes = static_cast<uint64_t>(formatOf(target.format).scaleBytes());
        std::byte one[kLargestRowBlock], scale[sizeof(float)];
        BlockMatrix zeros = part.matrix;
        zeros.columns = block;
        zeros.codes = one;
        zeros.scales = scale;
        quantize(zeros, kZeros, how);
        std::memset(part.matrix.codes, static_cast<int>(one[0]),
                    static_cast<uint64_t>(codesAt(target, part.element + part.matrix.columns) - part.matrix.codes));
        for (uint64_t i = 0; i < blocks; ++i)
          std::memcpy(scales + i * scaleBytes, scale, scaleBytes);
      });
}

void encodeElements(const Quantized &with, ElementSpan span, std::byte *codes, const std::byte *wide,
                    const ConvertOptions &how) {
  const uint64_t begin = span.first, item = itemBytes(with.wide);
  forElements(with, begin, begin + span.count, [&](const RowPart &part) {
    const uint64_t at = part.first - begin;
    quantizeWithScales(matrixOf(with, part, codes + at), wide + at * item, how);
  });
}

void decodeElements(const Quantized &source, ElementSpan span, std::byte *wide, const ConvertOptions &how) {
  const uint64_t item = itemBytes(source.wide), block = blockShape(source.format).columns, first = span.first;
  const bool pairs = formatOf(source.format).codesPerByte() == 2;
  forElements(source, first, first + span.count, [&](const RowPart &part) {
    std::byte *const to = wide + (part.first - first) * item;
    const uint64_t skipped = pairs ? part.first % block : 0;
    if (skipped == 0)
      return dequantize(matrixOf(source, part, codesAt(source, part.first)), to, how);
    // The range may begin within a byte: the whole block is decoded and a part of it copied.
    std::byte elements[kLargestRowBlock * sizeof(float)];
    const RowPart whole = {part.first - skipped, part.first - skipped + block, part.scales};
    dequantize(matrixOf(source, whole, codesAt(source, whole.first)), elements, {false, how.level});
    std::memcpy(to, elements + skipped * item, (part.end - part.first) * item);
  });
}

void toPlainScales(const Quantized &source, std::byte *plain) {
  const ScaleShape shape = source.scaleShape();
  for (uint64_t matrix = 0; matrix < source.matrices; ++matrix)
    readScales(plain + matrix * shape.rows * shape.columns, static_cast<int64_t>(shape.columns),
               scalesOf(source, matrix), {0, 0, shape.rows, shape.columns});
}

void fromPlainScales(const Quantized &target, const std::byte *plain) {
  const ScaleShape shape = target.scaleShape();
  for (uint64_t matrix = 0; matrix < target.matrices; ++matrix)
    writeScales(scalesOf(target, matrix), {0, 0, shape.rows, shape.columns},
                plain + matrix * shape.rows * shape.columns, static_cast<int64_t>(shape.columns));
  clearScalePadding(target);
}

void clearScalePadding(const Quantized &target) {
  for (uint64_t matrix = 0; matrix < target.matrices; ++matrix)
    clearScalePadding(scalesOf(target, matrix));
}

} // namespace reshard::kernels
