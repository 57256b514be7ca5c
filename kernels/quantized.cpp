#include "kernels/quantized.h"

#include "kernels/scales.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>

namespace reshard::kernels {

namespace {

/// Bytes of scales that are copied to a buffer at a time if the kernels cannot use them in place.
constexpr uint64_t kScratch = 1024, kScratchFloats = kScratch / sizeof(float);

ScaleShape scaleShape(const Quantized &of) {
  const BlockShape block = blockShape(of.format);
  return {(of.rows + block.rows - 1) / block.rows, (of.columns + block.columns - 1) / block.columns};
}

float tensorScale(const Quantized &of, uint64_t element) {
  float scale;
  std::memcpy(&scale, of.tensorScales + element / (of.rows * of.columns) * sizeof(scale), sizeof(scale));
  return scale;
}

std::byte *codesAt(const Quantized &of, uint64_t element) {
  return of.codes + (of.format == Quantization::nvfp4 ? element / 2 : element);
}

enum class Access { read, write };

/// mxfp8, nvfp4: calls visit(first block, count, their scales, contiguous) for parts of blocks [first, first + count)
/// that lie in one matrix each. Swizzled scales are copied to a buffer and back: as many whole rows as fit, or parts of
/// longer rows.
template <Access kAccess, class Visit>
void forBlocks(const Quantized &of, uint64_t first, uint64_t count, Visit visit) {
  const ScaleShape shape = scaleShape(of);
  const uint64_t ofMatrix = shape.rows * shape.columns, end = first + count;
  std::byte scratch[kScratch];
  while (first < end) {
    const uint64_t inMatrix = first % ofMatrix;
    std::byte *const scales = of.scales + first / ofMatrix * of.scaleBytes();
    uint64_t blocks = std::min(end - first, ofMatrix - inMatrix);
    if (!of.swizzled) {
      visit(first, blocks, scales + inMatrix);
    } else {
      blocks = std::min(blocks, kScratch);
      ScaleSlice slice = {inMatrix / shape.columns, inMatrix % shape.columns, 1, 0};
      slice.columns = std::min(blocks, shape.columns - slice.column);
      if (slice.columns == shape.columns)
        slice.rows = blocks / shape.columns;
      blocks = slice.rows * slice.columns;
      const auto stride = static_cast<int64_t>(slice.columns);
      if (kAccess == Access::read)
        unswizzleScales(scratch, stride, scales, shape, slice);
      visit(first, blocks, scratch);
      if (kAccess == Access::write)
        swizzleScales(scales, shape, slice, scratch, stride);
    }
    first += blocks;
  }
}

/// block_fp8: calls visit(first element, matrix of adjacent elements, its scales) for rows of blocks
/// [first, first + count), or for parts of them, and stores the scales, which need no alignment.
template <class Visit> void forBlockRows(const Quantized &of, uint64_t first, uint64_t count, Visit visit) {
  const ScaleShape shape = scaleShape(of);
  const auto codeStride = static_cast<int64_t>(of.columns),
             wideStride = static_cast<int64_t>(of.columns * itemBytes(of.wide));
  float scales[kScratchFloats];
  for (uint64_t blockRow = first; blockRow < first + count; ++blockRow) {
    const uint64_t row = blockRow % shape.rows * kFp8Block,
                   element = (blockRow / shape.rows * of.rows + row) * of.columns;
    for (uint64_t block = 0; block < shape.columns; block += kScratchFloats) {
      const uint64_t blocks = std::min(kScratchFloats, shape.columns - block), column = block * kFp8Block;
      const uint64_t columns = std::min(blocks * kFp8Block, of.columns - column);
      visit(element + column, Matrix{std::min(kFp8Block, of.rows - row), columns, codeStride, wideStride}, scales);
      std::memcpy(of.scales + (blockRow * shape.columns + block) * sizeof(float), scales, blocks * sizeof(float));
    }
  }
}

/// Calls step(first element, count, scales) for elements [first, end) of one row of blocks whose first scale is given:
/// once for a first block that begins `skipped` elements before `first`, and once for all others together.
template <class Scale, class Step>
void fromBlock(uint64_t first, uint64_t end, uint64_t skipped, uint64_t block, const Scale *scales, Step step) {
  if (skipped > 0) {
    const uint64_t rest = std::min(block - skipped, end - first);
    step(first, rest, scales++);
    first += rest;
  }
  if (first < end)
    step(first, end - first, scales);
}

/// mxfp8, nvfp4: calls fromBlock for parts of elements [first, first + count) that lie in one matrix each.
template <class Step> void forElements(const Quantized &of, uint64_t first, uint64_t count, Step step) {
  const uint64_t block = blockShape(of.format).columns, end = first + count;
  if (count == 0)
    return;
  forBlocks<Access::read>(of, first / block, (end + block - 1) / block - first / block,
                          [&](uint64_t index, uint64_t blocks, const std::byte *scales) {
                            const uint64_t from = std::max(first, index * block),
                                           to = std::min(end, (index + blocks) * block);
                            fromBlock(from, to, from % block, block, scales, step);
                          });
}

/// block_fp8: the same, for parts that lie in one row each.
template <class Step> void forRowElements(const Quantized &of, uint64_t first, uint64_t count, Step step) {
  const ScaleShape shape = scaleShape(of);
  float scales[kScratchFloats];
  for (const uint64_t end = first + count; first < end;) {
    const uint64_t row = first / of.columns, column = first % of.columns, block = column / kFp8Block;
    const uint64_t blockRow = row / of.rows * shape.rows + row % of.rows / kFp8Block;
    const uint64_t blocks = std::min(kScratchFloats, shape.columns - block);
    const uint64_t to = std::min(end, first + std::min((block + blocks) * kFp8Block, of.columns) - column);
    std::memcpy(scales, of.scales + (blockRow * shape.columns + block) * sizeof(float), blocks * sizeof(float));
    fromBlock(first, to, column % kFp8Block, kFp8Block, scales, step);
    first = to;
  }
}

/// A matrix of one row; its strides are not used.
Matrix oneRow(uint64_t columns) { return {1, columns, 0, 0}; }

} // namespace

uint64_t Quantized::scaleBytes() const {
  const ScaleShape shape = scaleShape(*this);
  return swizzled ? swizzledBytes(shape)
                  : shape.rows * shape.columns * (format == Quantization::block_fp8 ? sizeof(float) : 1);
}

uint64_t Quantized::blockRows() const { return matrices * scaleShape(*this).rows; }

void quantizeRows(const Quantized &target, const std::byte *wide, uint64_t first, uint64_t count, ConvertOptions how) {
  if (target.format != Quantization::block_fp8)
    return quantizeBlocks(target, first * target.columns, wide + first * target.columns * itemBytes(target.wide),
                          count * target.columns, how);
  forBlockRows(target, first, count, [&](uint64_t element, const Matrix &matrix, float *scales) {
    quantizeBlockFp8(target.codes + element, scales, target.wide, wide + element * itemBytes(target.wide), matrix, how);
  });
}

void scaleRows(const Quantized &target, const std::byte *wide, uint64_t first, uint64_t count, ConvertOptions how) {
  const uint64_t item = itemBytes(target.wide), block = blockShape(target.format).columns;
  if (target.format == Quantization::block_fp8)
    return forBlockRows(target, first, count, [&](uint64_t element, const Matrix &matrix, float *scales) {
      // Row by row, in memory order: block by block takes twice as long (docs/performance.md).
      const uint64_t blocks = (matrix.columns + kFp8Block - 1) / kFp8Block;
      std::fill_n(scales, blocks, 0.0f);
      for (uint64_t row = 0; row < matrix.rows; ++row)
        for (uint64_t b = 0; b < blocks; ++b) {
          const uint64_t column = b * kFp8Block;
          const Matrix part = oneRow(std::min(kFp8Block, matrix.columns - column));
          const float blockAmax = amax(target.wide, wide + (element + row * target.columns + column) * item, part, how);
          if (!(blockAmax <= scales[b]) && !std::isnan(scales[b]))
            scales[b] = blockAmax;
        }
      std::transform(scales, scales + blocks, scales, fp8Scale);
    });
  const uint64_t columns = scaleShape(target).columns;
  forBlocks<Access::write>(
      target, first * columns, count * columns, [&](uint64_t index, uint64_t blocks, std::byte *scales) {
        const std::byte *const from = wide + index * block * item;
        if (target.format == Quantization::mxfp8)
          scaleMxfp8(scales, target.wide, from, blocks * block, how);
        else
          scaleNvfp4(scales, tensorScale(target, index * block), target.wide, from, blocks * block, how);
      });
}

void quantizeBlocks(const Quantized &target, uint64_t first, const std::byte *wide, uint64_t count,
                    ConvertOptions how) {
  const uint64_t block = blockShape(target.format).columns;
  assert(target.format != Quantization::block_fp8 && first % block == 0 && count % block == 0);
  auto quantize = [&](std::byte *codes, std::byte *scales, uint64_t element, const std::byte *from, uint64_t elements) {
    if (target.format == Quantization::mxfp8)
      quantizeMxfp8(codes, scales, target.wide, from, elements, how);
    else
      quantizeNvfp4(codes, scales, tensorScale(target, element), target.wide, from, elements, how);
  };
  forBlocks<Access::write>(
      target, first / block, count / block, [&](uint64_t index, uint64_t blocks, std::byte *scales) {
        const uint64_t element = index * block;
        std::byte *const codes = codesAt(target, element);
        if (wide)
          return quantize(codes, scales, element, wide + (element - first) * itemBytes(target.wide), blocks * block);
        // All blocks of zeros are equal, and all bytes of their codes are equal, so one block is quantized and
        // repeated. Its scale is computed, because a NaN tensor scale makes it NaN.
        constexpr std::byte kZeros[kMxBlock * sizeof(float)] = {};
        std::byte one[kMxBlock], scale;
        quantize(one, &scale, element, kZeros, block);
        std::memset(codes, static_cast<int>(one[0]),
                    static_cast<uint64_t>(codesAt(target, element + blocks * block) - codes));
        std::memset(scales, static_cast<int>(scale), blocks);
      });
}

void encodeElements(const Quantized &with, uint64_t first, std::byte *codes, const std::byte *wide, uint64_t count,
                    ConvertOptions how) {
  assert(with.format != Quantization::nvfp4);
  const uint64_t item = itemBytes(with.wide), begin = first;
  if (with.format == Quantization::mxfp8)
    return forElements(with, first, count, [&](uint64_t element, uint64_t elements, const std::byte *scales) {
      encodeMxfp8(codes + (element - begin), scales, with.wide, wide + (element - begin) * item, elements, how);
    });
  forRowElements(with, first, count, [&](uint64_t element, uint64_t elements, const float *scales) {
    encodeBlockFp8(codes + (element - begin), scales, with.wide, wide + (element - begin) * item, oneRow(elements),
                   how);
  });
}

void decodeElements(const Quantized &source, uint64_t first, std::byte *wide, uint64_t count, ConvertOptions how) {
  const uint64_t item = itemBytes(source.wide), begin = first;
  if (source.format == Quantization::block_fp8)
    return forRowElements(source, first, count, [&](uint64_t element, uint64_t elements, const float *scales) {
      dequantizeBlockFp8(source.wide, wide + (element - begin) * item, source.codes + element, scales, oneRow(elements),
                         how);
    });
  forElements(source, first, count, [&](uint64_t element, uint64_t elements, const std::byte *scales) {
    std::byte *const to = wide + (element - begin) * item;
    if (source.format == Quantization::mxfp8)
      return dequantizeMxfp8(source.wide, to, source.codes + element, scales, elements, how);
    const float ofTensor = tensorScale(source, element);
    const uint64_t skipped = element % kNvfp4Block;
    if (skipped == 0)
      return dequantizeNvfp4(source.wide, to, codesAt(source, element), scales, ofTensor, elements, how);
    // The range may begin within a byte: the whole block is decoded and a part of it copied.
    std::byte block[kNvfp4Block * sizeof(float)];
    dequantizeNvfp4(source.wide, block, codesAt(source, element - skipped), scales, ofTensor, kNvfp4Block,
                    {false, how.level});
    std::memcpy(to, block + skipped * item, elements * item);
  });
}

void unswizzle(const Quantized &source, std::byte *plain) {
  const ScaleShape shape = scaleShape(source);
  for (uint64_t matrix = 0; matrix < source.matrices; ++matrix)
    unswizzleScales(plain + matrix * shape.rows * shape.columns, static_cast<int64_t>(shape.columns),
                    source.scales + matrix * swizzledBytes(shape), shape, {0, 0, shape.rows, shape.columns});
}

void swizzle(const Quantized &target, const std::byte *plain) {
  const ScaleShape shape = scaleShape(target);
  for (uint64_t matrix = 0; matrix < target.matrices; ++matrix) {
    std::byte *const scales = target.scales + matrix * swizzledBytes(shape);
    swizzleScales(scales, shape, {0, 0, shape.rows, shape.columns}, plain + matrix * shape.rows * shape.columns,
                  static_cast<int64_t>(shape.columns));
    clearScalePadding(scales, shape);
  }
}

} // namespace reshard::kernels
