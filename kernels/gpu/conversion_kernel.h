// SPDX-License-Identifier: Apache-2.0
// A table of strided copies that convert elements (kernels/cpu/convert_strided.h) and of computations on quantized
// matrices, and the part of it that one warp of a launch runs. As in copy_kernel.h: plain structs and inline functions
// that a GPU and the host run. The results equal those of the CPU kernels, bit for bit.
#pragma once

#include "kernels/codes.h"
#include "kernels/gpu/copy_kernel.h"
#include "kernels/scales.h"

#if defined(__CUDACC__)
#include <cuda_fp8.h>
#endif

namespace reshard::kernels {

/// Maximum number of elements that a lane holds at a time.
constexpr uint32_t kVector = 8;
/// Units of a tile, which one warp runs. Blocks that lie in one row begin and end within a tile.
constexpr uint32_t kTileUnits = 8 * kWarpThreads;

/// Quantized matrices in device memory (see Quantized), and the addresses that encode the indices of their elements.
struct TableMatrices {
  uint64_t begin;                       // address of element 0; address a means element (a - begin) / itemBytes
  uint64_t codes, scales, tensorScales; // addresses; codes 0: compute only scales
  uint64_t rows, columns, matrixElements;
  uint64_t scaleBytes;         // the scales of one matrix
  ScaleShape shape;            // the scales of one matrix
  uint8_t rowBits, columnBits; // binary logarithms of the rows and columns of a block
  NumberFormat wide, code;
  ScaleFormat scale;
  ScaleLayout layout;

  RESHARD_HOST_DEVICE bool blocksInRows() const { return rowBits == 0; }
  /// Returns the codes of a byte.
  RESHARD_HOST_DEVICE uint64_t codesPerByte() const {
    return code == NumberFormat::fp4_e2m1 || code == NumberFormat::int4 ? 2 : 1;
  }
  RESHARD_HOST_DEVICE uint64_t bytesOfScale() const {
    return scale == ScaleFormat::fp32 ? 4 : scale == ScaleFormat::bf16 ? 2 : 1;
  }
  /// Returns the address of the byte of an element's code.
  RESHARD_HOST_DEVICE uint64_t codeAddress(uint64_t element) const {
    return codes + (codesPerByte() == 2 ? element / 2 : element);
  }
};

/// The computation of an entry, and its unit.
enum class Task : uint8_t {
  rows,         ///< copies up to kVector elements of a row from source to target, or computes scales or amax from them
  blocks,       ///< quantizes a block of several rows
  toPlain,      ///< copies one scale of one byte from the matrices' layout to the plain one
  fromPlain,    ///< writes one byte of the matrices' layout from the plain one; padding becomes zero
  padding,      ///< writes one byte of padding of the matrices' layout
  tensorScales, ///< computes the tensor scale of a matrix from the amax values of its parts
};
/// Storage form of the elements that are read, and of the elements that are written.
enum class Reads : uint8_t { plain, elements, codes };
enum class Writes : uint8_t { plain, quantized, amax };

constexpr uint32_t kNoMatrices = 0xFFFFFFFF;

struct ConversionEntry {
  uint64_t source, target; // addresses of the shape's first unit; `rows`: source 0 means zeros; `blocks`: source of
                           // element 0, even if it is outside the entry
  uint64_t slot;           // its first tile in the table
  uint64_t overflowed;     // address of a number that a value beyond the range of `stores` raises to 1; 0: none
  uint32_t first, units;   // units of the shape, numbered along rows; `blocks`: first row of blocks, number of blocks;
                           // `tensorScales`: amax values per matrix, number of matrices
  uint32_t shape;
  uint32_t from, to; // indices of matrices
  Task task;
  Reads reads;
  Writes writes;
  NumberFormat loads, stores; // formats of plain memory
  Overflow overflow;          // what happens to a value beyond the range of `stores`
  uint8_t vector;             // elements of a unit: 8, 4, 2 or 1
  uint8_t sourceVector;       // elements that are read at once: `vector`, or 1 if the source has them in several blocks
  uint8_t sourceWidth, targetWidth; // bytes of one load and of one store; all addresses of units are multiples
};

struct ConversionTableView {
  const ConversionEntry *entries; // entryCount of them, then a sentinel whose slot is `tiles`
  const TableShape *shapes;
  const TableLoop *loops;
  const TableMatrices *matrices;
  uint64_t tiles;
  uint32_t entryCount;
};

namespace detail {

/// Loads `bytes` bytes (at most 32) from an address into little-endian words, which must be 0 before. `Again`: the
/// bytes are read once more soon and shall stay in the caches.
template <class T, bool Again>
RESHARD_HOST_DEVICE inline void loadAs(uint64_t address, uint32_t bytes, uint32_t (&words)[kVector]) {
  RESHARD_UNROLL
  for (uint32_t at = 0; at < sizeof words; at += sizeof(T)) {
    if (at >= bytes)
      continue;
    const T value = load<T, Again>(address + at);
    if constexpr (sizeof(T) == 16) {
      RESHARD_UNROLL
      for (uint32_t w = 0; w < 4; ++w)
        words[at / 4 + w] = value.words[w];
    } else {
      words[at / 4] |= static_cast<uint32_t>(value) << at % 4 * 8;
      if constexpr (sizeof(T) == 8)
        words[at / 4 + 1] = static_cast<uint32_t>(value >> 32);
    }
  }
}
template <class T>
RESHARD_HOST_DEVICE inline void storeAs(uint64_t address, uint32_t bytes, const uint32_t (&words)[kVector]) {
  RESHARD_UNROLL
  for (uint32_t at = 0; at < sizeof words; at += sizeof(T)) {
    if (at >= bytes)
      continue;
    if constexpr (sizeof(T) == 16)
      store<T>(address + at, {{words[at / 4], words[at / 4 + 1], words[at / 4 + 2], words[at / 4 + 3]}});
    else if constexpr (sizeof(T) == 8)
      store<T>(address + at, static_cast<T>(words[at / 4 + 1]) << 32 | words[at / 4]);
    else
      store<T>(address + at, static_cast<T>(words[at / 4] >> at % 4 * 8));
  }
}

/// Adjacent elements in memory. `width`: bytes of one load or store.
struct Access {
  uint64_t address;
  uint32_t count, width;
};

template <bool Again>
RESHARD_HOST_DEVICE inline void loadWords(uint64_t address, uint32_t bytes, uint32_t width,
                                          uint32_t (&words)[kVector]) {
  switch (width) {
  case 16:
    return loadAs<Unit16, Again>(address, bytes, words);
  case 8:
    return loadAs<unsigned long long, Again>(address, bytes, words);
  case 4:
    return loadAs<unsigned, Again>(address, bytes, words);
  case 2:
    return loadAs<unsigned short, Again>(address, bytes, words);
  default:
    return loadAs<unsigned char, Again>(address, bytes, words);
  }
}

RESHARD_HOST_DEVICE inline void storeWords(uint64_t address, uint32_t bytes, uint32_t width,
                                           const uint32_t (&words)[kVector]) {
  switch (width) {
  case 16:
    return storeAs<Unit16>(address, bytes, words);
  case 8:
    return storeAs<unsigned long long>(address, bytes, words);
  case 4:
    return storeAs<unsigned>(address, bytes, words);
  case 2:
    return storeAs<unsigned short>(address, bytes, words);
  default:
    return storeAs<unsigned char>(address, bytes, words);
  }
}

/// Converts packed codes to fp32 bits, and back. Elements beyond the unit's last are zeros or ignored.
template <NumberFormat Of>
RESHARD_HOST_DEVICE inline void decodeWords(const uint32_t (&words)[kVector], uint32_t (&bits)[kVector]) {
  constexpr uint32_t kBits = static_cast<uint32_t>(encoding(Of).bits), kEach = 32 / kBits;
  RESHARD_UNROLL
  for (uint32_t k = 0; k < kVector; ++k)
    bits[k] = decodeBits<Of>(words[k / kEach] << (32 - kBits - k % kEach * kBits) >> (32 - kBits));
}
template <NumberFormat Of>
RESHARD_HOST_DEVICE inline void encodeWords(const uint32_t (&bits)[kVector], Overflow overflow,
                                            uint32_t (&words)[kVector]) {
  constexpr uint32_t kBits = static_cast<uint32_t>(encoding(Of).bits), kEach = 32 / kBits;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (Of == NumberFormat::fp8_e4m3)
    // One instruction converts two values, but loses the sign of a NaN. E5M2 is excluded: the instruction would give
    // another NaN code.
    if (overflow == Overflow::saturate) {
      RESHARD_UNROLL
      for (uint32_t k = 0; k < kVector; k += 2) {
        const float2 two = make_float2(bitCast<float>(bits[k]), bitCast<float>(bits[k + 1]));
        const uint32_t signs = (bits[k] >> 24 & 0x80) | (bits[k + 1] >> 16 & 0x8000),
                       codes = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
        words[k / kEach] = (k % kEach > 0 ? words[k / kEach] : 0) | (codes | signs) << k % kEach * kBits;
      }
      return;
    }
#endif
  RESHARD_UNROLL
  for (uint32_t k = 0; k < kVector; ++k)
    words[k / kEach] = (k % kEach > 0 ? words[k / kEach] : 0) | encodeBits<Of>(bits[k], overflow) << k % kEach * kBits;
}

RESHARD_HOST_DEVICE inline uint32_t bitsOf(NumberFormat format) {
  return format == NumberFormat::fp32       ? 32
         : format <= NumberFormat::fp16     ? 16
         : format >= NumberFormat::fp4_e2m1 ? 4
                                            : 8;
}

template <bool Again = false>
RESHARD_HOST_DEVICE inline void loadElements(NumberFormat format, const Access &from, uint32_t (&bits)[kVector]) {
  uint32_t words[kVector] = {};
  loadWords<Again>(from.address, (from.count * bitsOf(format) + 7) / 8, from.width, words);
  switch (format) {
  case NumberFormat::fp32:
    return decodeWords<NumberFormat::fp32>(words, bits);
  case NumberFormat::bf16:
    return decodeWords<NumberFormat::bf16>(words, bits);
  case NumberFormat::fp16:
    return decodeWords<NumberFormat::fp16>(words, bits);
  case NumberFormat::fp8_e4m3:
    return decodeWords<NumberFormat::fp8_e4m3>(words, bits);
  case NumberFormat::fp8_e5m2:
    return decodeWords<NumberFormat::fp8_e5m2>(words, bits);
  case NumberFormat::fp4_e2m1:
    return decodeWords<NumberFormat::fp4_e2m1>(words, bits);
  case NumberFormat::int4:
    return decodeWords<NumberFormat::int4>(words, bits);
  }
}

RESHARD_HOST_DEVICE inline void storeElements(NumberFormat format, const Access &to, Overflow overflow,
                                              const uint32_t (&bits)[kVector]) {
  uint32_t words[kVector] = {};
  switch (format) {
  case NumberFormat::fp32:
    encodeWords<NumberFormat::fp32>(bits, overflow, words);
    break;
  case NumberFormat::bf16:
    encodeWords<NumberFormat::bf16>(bits, overflow, words);
    break;
  case NumberFormat::fp16:
    encodeWords<NumberFormat::fp16>(bits, overflow, words);
    break;
  case NumberFormat::fp8_e4m3:
    encodeWords<NumberFormat::fp8_e4m3>(bits, overflow, words);
    break;
  case NumberFormat::fp8_e5m2:
    encodeWords<NumberFormat::fp8_e5m2>(bits, overflow, words);
    break;
  case NumberFormat::fp4_e2m1:
    encodeWords<NumberFormat::fp4_e2m1>(bits, overflow, words);
    break;
  case NumberFormat::int4:
    encodeWords<NumberFormat::int4>(bits, overflow, words);
    break;
  }
  storeWords(to.address, (to.count * bitsOf(format) + 7) / 8, to.width, words);
}

/// Raises the number at `overflowed` to 1 if an element is beyond the range of a format.
RESHARD_HOST_DEVICE inline void reportBeyond(NumberFormat format, uint64_t overflowed,
                                             const uint32_t (&bits)[kVector]) {
  const uint32_t first = firstBeyond(format), last = lastBeyond(format);
  bool any = false;
  RESHARD_UNROLL
  for (uint32_t k = 0; k < kVector; ++k)
    any = any || ((bits[k] & kMagnitudeBits) >= first && (bits[k] & kMagnitudeBits) <= last);
  if (any)
    raiseTo(overflowed, 1);
}

/// Rounds elements to the format `wide`, as if they were stored in it in between.
RESHARD_HOST_DEVICE inline void roundTo(NumberFormat wide, uint32_t (&bits)[kVector]) {
  RESHARD_UNROLL
  for (uint32_t k = 0; k < kVector; ++k)
    bits[k] = wide == NumberFormat::bf16
                  ? decodeBits<NumberFormat::bf16>(encodeBits<NumberFormat::bf16>(bits[k], Overflow::infinity))
              : wide == NumberFormat::fp16
                  ? decodeBits<NumberFormat::fp16>(encodeBits<NumberFormat::fp16>(bits[k], Overflow::infinity))
                  : bits[k];
}

RESHARD_HOST_DEVICE inline float loadFloat(uint64_t address) {
  uint32_t words[kVector] = {};
  loadWords<true>(address, 4, address % 4 == 0 ? 4 : 1, words);
  return bitCast<float>(words[0]);
}
RESHARD_HOST_DEVICE inline void storeFloat(uint64_t address, uint32_t bits) {
  const uint32_t words[kVector] = {bits};
  storeWords(address, 4, address % 4 == 0 ? 4 : 1, words);
}

RESHARD_HOST_DEVICE inline float loadBf16(uint64_t address) {
  uint32_t words[kVector] = {};
  loadWords<true>(address, 2, address % 2 == 0 ? 2 : 1, words);
  return bitCast<float>(decodeBits<NumberFormat::bf16>(words[0]));
}
RESHARD_HOST_DEVICE inline void storeBf16(uint64_t address, uint32_t code) {
  const uint32_t words[kVector] = {code};
  storeWords(address, 2, address % 2 == 0 ? 2 : 1, words);
}

/// Returns the address of the scale of an element's block; of several equal ones, that of the first.
RESHARD_HOST_DEVICE inline uint64_t scaleAddress(const TableMatrices &m, uint64_t element) {
  if (m.blocksInRows() && m.layout == ScaleLayout::plain)
    return m.scales + (element >> m.columnBits) * m.bytesOfScale(); // rows are whole blocks
  const uint64_t matrix = quotient(element, m.matrixElements), within = element - matrix * m.matrixElements;
  const uint64_t row = quotient(within, m.columns), column = within - row * m.columns;
  const uint64_t offset = scaleOffset(m.layout, m.shape, row >> m.rowBits, column >> m.columnBits);
  return m.scales + matrix * m.scaleBytes + offset * m.bytesOfScale();
}

RESHARD_HOST_DEVICE inline float tensorScaleOf(const TableMatrices &m, uint64_t element) {
  return loadFloat(m.tensorScales + 4 * quotient(element, m.matrixElements));
}

/// Division and multiplication of all elements by one number.
RESHARD_HOST_DEVICE inline void divide(uint32_t (&bits)[kVector], float divisor) {
  RESHARD_UNROLL
  for (uint32_t k = 0; k < kVector; ++k)
    bits[k] = withSign(bitCast<float>(bits[k]) / divisor, bits[k]);
}
RESHARD_HOST_DEVICE inline void multiply(uint32_t (&bits)[kVector], float factor) {
  const uint32_t flip = factor == factor ? bitCast<uint32_t>(factor) & ~kMagnitudeBits : 0; // a NaN has no sign
  RESHARD_UNROLL
  for (uint32_t k = 0; k < kVector; ++k)
    bits[k] = withSign(bitCast<float>(bits[k]) * factor, bits[k] ^ flip);
}

RESHARD_HOST_DEVICE inline uint32_t amaxOf(const uint32_t (&bits)[kVector], uint32_t most) {
  RESHARD_UNROLL
  for (uint32_t k = 0; k < kVector; ++k)
    most = (bits[k] & kMagnitudeBits) > most ? bits[k] & kMagnitudeBits : most;
  return most;
}

/// Returns the number by which the codes of an element's block are multiplied.
RESHARD_HOST_DEVICE inline float factorOf(const TableMatrices &m, uint64_t element) {
  const uint64_t at = scaleAddress(m, element);
  if (m.scale == ScaleFormat::fp32)
    return loadFloat(at);
  if (m.scale == ScaleFormat::bf16)
    return loadBf16(at);
  const uint32_t code = load<unsigned char, true>(at);
  return m.scale == ScaleFormat::e8m0
             ? e8m0(code)
             : bitCast<float>(decodeBits<NumberFormat::fp8_e4m3>(code)) * tensorScaleOf(m, element);
}

/// Reads the elements of one load as fp32 bits.
RESHARD_HOST_DEVICE inline void readElements(const ConversionTableView &view, const ConversionEntry &entry,
                                             uint64_t source, uint32_t (&bits)[kVector]) {
  if (entry.reads != Reads::elements) {
    if (entry.source)
      loadElements(entry.loads, {source, entry.sourceVector, entry.sourceWidth}, bits);
    if (entry.reads == Reads::plain)
      return;
    const TableMatrices &m = view.matrices[entry.from];
    const uint64_t at = scaleAddress(m, (source - m.begin) / (bitsOf(entry.loads) / 8));
    if (m.scale == ScaleFormat::fp32)
      divide(bits, loadFloat(at));
    else
      multiply(bits, inverseE8m0(load<unsigned char, true>(at)));
    return;
  }
  const TableMatrices &m = view.matrices[entry.from];
  const uint64_t element = source - m.begin;
  loadElements(m.code, {m.codeAddress(element), entry.sourceVector, entry.sourceWidth}, bits);
  if (m.codesPerByte() == 2 && entry.sourceVector == 1) { // one of the two codes of the byte
    bits[0] = element % 2 == 1 ? bits[1] : bits[0];
    bits[1] = 0;
  }
  multiply(bits, factorOf(m, element));
  if (entry.writes != Writes::plain || entry.stores != m.wide)
    roundTo(m.wide, bits);
}

/// Reads the elements of a unit. Elements that are loaded one at a time enter at the end and shift to the front.
RESHARD_HOST_DEVICE inline void readUnit(const ConversionTableView &view, const ConversionEntry &entry, uint64_t source,
                                         uint32_t (&bits)[kVector]) {
  const bool together = entry.sourceVector == entry.vector;
  RESHARD_NO_UNROLL
  for (uint32_t one = 0; one < entry.vector;
       one += entry.sourceVector, ++source) { // sourceVector < vector only for matrices, whose addresses count elements
    uint32_t next[kVector] = {};
    readElements(view, entry, source, next);
    RESHARD_UNROLL
    for (uint32_t k = 0; k + 1 < kVector; ++k)
      bits[k] = together ? next[k] : bits[k + 1];
    bits[kVector - 1] = together ? next[kVector - 1] : next[0];
  }
}

/// Writes the codes of a unit; the first unit of a block also writes the block's scale, from the block's amax.
RESHARD_HOST_DEVICE inline void quantizeUnit(const ConversionEntry &entry, const TableMatrices &m, uint64_t element,
                                             uint32_t amax, uint32_t (&bits)[kVector]) {
  const bool powers = m.scale == ScaleFormat::e8m0, wide = m.scale == ScaleFormat::bf16;
  const float ofTensor = powers || wide ? 1.0f : tensorScaleOf(m, element);
  const uint32_t code =
      powers ? powerOfTwo(amax, m.code)
      : wide ? bf16Quotient(amax, scaleDivisor(m.code))
             : encodeBits<NumberFormat::fp8_e4m3>(quotientOrOne(amax, largest(m.code) * ofTensor) & kMagnitudeBits,
                                                  Overflow::saturate);
  if ((element & ((uint64_t{1} << m.columnBits) - 1)) == 0) {
    const uint64_t at = scaleAddress(m, element);
    if (wide)
      storeBf16(at, code);
    else
      store(at, static_cast<unsigned char>(code));
  }
  if (!m.codes)
    return;
  if (powers) {
    multiply(bits, inverseE8m0(code)); // only NaN is beyond the largest code
  } else {
    const float factor =
        bitCast<float>(wide ? decodeBits<NumberFormat::bf16>(code) : decodeBits<NumberFormat::fp8_e4m3>(code)) *
        ofTensor;
    divide(bits, factor == 0.0f ? bitCast<float>(kInfinityBits) : factor);
  }
  storeElements(m.code, {m.codeAddress(element), entry.vector, entry.targetWidth}, Overflow::saturate, bits);
}

/// Converts units [begin, end) of an entry of rows; they lie in one tile.
RESHARD_HOST_DEVICE inline void convertUnits(const ConversionTableView &view, const ConversionEntry &entry,
                                             uint32_t begin, uint32_t end, uint32_t lane) {
  const TableShape shape = view.shapes[entry.shape];
  const uint32_t sourceStep = entry.vector * (entry.reads == Reads::elements ? 1 : bitsOf(entry.loads) / 8);
  const uint32_t targetStep = entry.vector * (entry.writes == Writes::quantized ? 1 : bitsOf(entry.stores) / 8);
  uint32_t within[kLanesPerThread], amax[kLanesPerThread], most[kLanesPerThread];
  uint64_t source[kLanesPerThread], target[kLanesPerThread]; // addresses of the row
  for (uint32_t i = 0; i < kLanesPerThread; ++i) {
    within[i] = shape.rowUnits; // the row's addresses must be computed
    most[i] = 0;
  }
  RESHARD_NO_UNROLL
  for (uint32_t unit = begin; unit < end; unit += kWarpThreads) {
    uint32_t bits[kLanesPerThread][kVector];
    for (uint32_t i = 0; i < kLanesPerThread; ++i) {
      amax[i] = 0;
      for (uint32_t k = 0; k < kVector; ++k)
        bits[i][k] = 0;
      const uint32_t at = unit + lane + i;
      if (at >= end)
        continue;
      if (within[i] >= shape.rowUnits) {
        const uint32_t row = (entry.first + at) / shape.rowUnits;
        within[i] = entry.first + at - row * shape.rowUnits;
        source[i] = entry.source;
        target[i] = entry.target;
        addRow(view.loops, shape, row, source[i], target[i]);
      }
      readUnit(view, entry, source[i] + uint64_t{within[i]} * sourceStep, bits[i]);
      if (entry.writes != Writes::plain)
        amax[i] = amaxOf(bits[i], 0);
    }
    if (entry.writes == Writes::quantized)
      groupMax(amax, (1u << view.matrices[entry.to].columnBits) / kVector);
    for (uint32_t i = 0; i < kLanesPerThread; ++i) {
      if (unit + lane + i >= end)
        continue;
      const uint64_t to = target[i] + uint64_t{within[i]} * targetStep;
      if (entry.overflowed)
        reportBeyond(entry.stores, entry.overflowed, bits[i]);
      if (entry.writes == Writes::plain)
        storeElements(entry.stores, {to, entry.vector, entry.targetWidth}, entry.overflow, bits[i]);
      else if (entry.writes == Writes::quantized)
        quantizeUnit(entry, view.matrices[entry.to], to - view.matrices[entry.to].begin, amax[i], bits[i]);
      else
        most[i] = amax[i] > most[i] ? amax[i] : most[i];
      within[i] += kWarpThreads;
    }
  }
  if (entry.writes == Writes::amax) {
    groupMax(most, kWarpThreads);
    if (lane == 0)
      raiseTo(entry.target, most[0] >= kInfinityBits ? kNanBits : most[0]);
  }
}

/// Writes the scale of a block of several rows, and its repetitions. Returns the number that divides its elements, or,
/// for powers of two, multiplies them, which is faster.
RESHARD_HOST_DEVICE inline float storeBlockScale(const TableMatrices &m, uint64_t element, uint64_t blockRow,
                                                 uint32_t amax, uint32_t lane) {
  const uint64_t at = scaleAddress(m, element);
  if (m.scale == ScaleFormat::fp32) {
    const uint32_t scale = quotientOrOne(amax, largest(m.code));
    if (lane == 0)
      storeFloat(at, scale);
    return bitCast<float>(scale);
  }
  const uint32_t code = powerOfTwo(amax, m.code);
  const auto copies = static_cast<uint32_t>(scaleCopies(m.layout, m.shape, blockRow));
  for (uint32_t i = 0; i < kLanesPerThread; ++i)
    for (uint32_t copy = lane + i; copy < copies; copy += kWarpThreads)
      store(at + copy * kPackedScales, static_cast<unsigned char>(code));
  return inverseE8m0(code);
}

/// Quantizes a block of several rows, which is smaller at the edges: computes its amax, its scale and its codes.
RESHARD_HOST_DEVICE inline void convertBlock(const ConversionTableView &view, const ConversionEntry &entry,
                                             uint32_t number, uint32_t lane) {
  const TableMatrices &m = view.matrices[entry.to];
  const uint64_t below = quotient(number, m.shape.columns), blockRow = entry.first + below,
                 matrix = quotient(blockRow, m.shape.rows), inMatrix = blockRow - matrix * m.shape.rows;
  const uint64_t row = inMatrix << m.rowBits, column = (number - below * m.shape.columns) << m.columnBits;
  const uint64_t element = matrix * m.matrixElements + row * m.columns + column;
  const uint32_t height = 1u << m.rowBits, width = 1u << m.columnBits;
  const auto rows = static_cast<uint32_t>(m.rows - row < height ? m.rows - row : height);
  const auto units =
      static_cast<uint32_t>(m.columns - column < width ? m.columns - column : width) / entry.vector; // units of a row
  const uint32_t all = rows * units, item = bitsOf(entry.loads) / 8;
  uint32_t most[kLanesPerThread] = {};
  float scale = 0;
  for (int pass = 0; pass < (m.codes ? 2 : 1); ++pass) {
    RESHARD_UNROLL
    for (uint32_t i = 0; i < kLanesPerThread; ++i) {
      uint32_t r = (lane + i) / units, c = (lane + i) - r * units;
      const uint32_t rowStep = kWarpThreads / units, unitStep = kWarpThreads - rowStep * units;
      RESHARD_NO_UNROLL
      for (uint32_t unit = lane + i; unit < all; unit += kWarpThreads) {
        const uint64_t at = element + r * m.columns + c * entry.vector;
        uint32_t bits[kVector] = {};
        loadElements<true>(entry.loads, {entry.source + at * item, entry.vector, entry.sourceWidth}, bits);
        if (pass == 0) {
          most[i] = amaxOf(bits, most[i]);
        } else {
          if (m.scale == ScaleFormat::fp32)
            divide(bits, scale);
          else
            multiply(bits, scale);
          storeElements(m.code, {m.codeAddress(at), entry.vector, entry.targetWidth}, Overflow::saturate, bits);
        }
        r += rowStep;
        c += unitStep;
        if (c >= units) {
          c -= units;
          ++r;
        }
      }
    }
    if (pass > 0)
      break;
    groupMax(most, kWarpThreads);
    scale = storeBlockScale(m, element, inMatrix, most[0], lane);
  }
}

/// Runs one unit of the remaining tasks.
RESHARD_HOST_DEVICE inline void convertOne(const ConversionTableView &view, const ConversionEntry &entry,
                                           uint32_t unit) {
  if (entry.task == Task::tensorScales) {
    uint32_t most = 0;
    for (uint32_t i = 0; i < entry.first; ++i) {
      const uint32_t one =
          bitCast<uint32_t>(loadFloat(entry.source + 4 * (uint64_t{unit} * entry.first + i))) & kMagnitudeBits;
      most = one > most ? one : most;
    }
    return storeFloat(entry.target + 4 * uint64_t{unit},
                      quotientOrOne(most, largest(NumberFormat::fp8_e4m3) * largest(NumberFormat::fp4_e2m1)));
  }
  const TableMatrices &m = view.matrices[entry.to];
  const uint64_t each = entry.task == Task::toPlain ? m.shape.rows * m.shape.columns : m.scaleBytes;
  const uint64_t matrix = quotient(unit, each), within = unit - matrix * each;
  if (entry.task == Task::toPlain) {
    const ScalePosition at = scalePosition(ScaleLayout::plain, m.shape, within);
    return store(entry.target + unit, load<unsigned char>(m.scales + matrix * m.scaleBytes +
                                                          scaleOffset(m.layout, m.shape, at.row, at.column)));
  }
  const ScalePosition at = scalePosition(m.layout, m.shape, within);
  const bool inside = at.row < m.shape.rows && at.column < m.shape.columns;
  if (entry.task == Task::fromPlain || !inside)
    store(m.scales + unit,
          inside ? load<unsigned char>(entry.source + (matrix * m.shape.rows + at.row) * m.shape.columns + at.column)
                 : static_cast<unsigned char>(0));
}

} // namespace detail

/// Returns the number of tiles of an entry.
RESHARD_HOST_DEVICE inline uint64_t tilesOf(const ConversionEntry &entry) {
  return entry.task == Task::blocks ? entry.units : (uint64_t{entry.units} + kTileUnits - 1) / kTileUnits;
}

/// The conversions of warp `warp` of block `block` of `blocks`: of lane `lane` on a GPU, of all lanes on the host
/// (`lane` 0). All warps of all blocks convert everything once. Blocks have equally many tiles; their warps take them
/// in turn.
RESHARD_HOST_DEVICE inline void convertWarp(const ConversionTableView &view, uint32_t block, uint32_t blocks,
                                            uint32_t warp, uint32_t lane) {
  const uint64_t begin = view.tiles / blocks * block + view.tiles % blocks * block / blocks;
  const uint64_t end = view.tiles / blocks * (block + 1) + view.tiles % blocks * (block + 1) / blocks;
  if (begin == end)
    return;
  const uint32_t after = detail::findEntry(view.entries, 0, view.entryCount, end - 1) + 1;
  uint32_t number = 0;
  RESHARD_NO_UNROLL
  for (uint64_t tile = begin + warp; tile < end; tile += kBlockThreads / kWarpThreads) {
    if (view.entries[number + 1].slot <= tile)
      number = detail::findEntry(view.entries, number + 1, after, tile);
    const ConversionEntry &entry = view.entries[number];
    const auto own = static_cast<uint32_t>(tile - entry.slot);
    if (entry.task == Task::blocks) {
      detail::convertBlock(view, entry, own, lane);
      continue;
    }
    const uint32_t first = own * kTileUnits, last = entry.units - first < kTileUnits ? entry.units : first + kTileUnits;
    if (entry.task == Task::rows) {
      detail::convertUnits(view, entry, first, last, lane);
      continue;
    }
    for (uint32_t i = 0; i < kLanesPerThread; ++i)
      RESHARD_NO_UNROLL
    for (uint32_t unit = first + lane + i; unit < last; unit += kWarpThreads)
      detail::convertOne(view, entry, unit);
  }
}

} // namespace reshard::kernels
