// SPDX-License-Identifier: Apache-2.0
// Conversion tables, run warp by warp as on a GPU, compared byte for byte with the CPU kernels on the same memory: with
// the host code, and lane by lane with the GPU code.

#include "kernels/gpu/conversion_table.h"
#include "tests/kernels/gpu_lanes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <random>
#include <vector>

using namespace reshard;
using namespace reshard::kernels;

namespace {

using Bytes = std::vector<std::byte>;
constexpr size_t kGuard = 64;

uint64_t at(const std::byte *pointer) { return reinterpret_cast<uint64_t>(pointer); }

/// A buffer of random alignment.
class Memory {
public:
  Memory(std::mt19937_64 &random, uint64_t bytes)
      : bytes_(bytes + 2 * kGuard + 16, std::byte{0xEE}), begin_(kGuard + (random() % 2 ? random() % 16 : 0)) {}
  std::byte *begin() { return bytes_.data() + begin_; }
  Bytes &all() { return bytes_; }

private:
  Bytes bytes_;
  size_t begin_;
};

/// Random elements of a format: many magnitudes, some values that are not finite, some ranges of zeros.
void fillElements(std::mt19937_64 &random, NumberFormat format, std::byte *to, uint64_t count) {
  const uint64_t item = itemBytes(format);
  const bool strange = random() % 4 == 0, any = random() % 3 == 0;
  for (uint64_t i = 0; i < count; ++i) {
    uint32_t code = static_cast<uint32_t>(random());
    if (!any) {
      const float value = std::ldexp(static_cast<float>(static_cast<int64_t>(random() % 2001) - 1000) / 1000,
                                     static_cast<int>(random() % 24) - 14);
      code = encode(format, i / 40 % 7 == 3 ? 0.0f : value, Overflow::saturate);
    }
    if (!strange && !std::isfinite(decode(format, code)))
      code = 0;
    std::memcpy(to + i * item, &code, item);
  }
}

/// A format of the table.
Quantization anyQuantization(std::mt19937_64 &random) {
  return static_cast<Quantization>(random() % std::size(kQuantizedFormats));
}
/// A format whose blocks have one row, or several.
Quantization anyQuantization(std::mt19937_64 &random, bool inRows) {
  for (;;)
    if (const Quantization format = anyQuantization(random); (blockShape(format).rows == 1) == inRows)
      return format;
}

/// A layout of the scales of a format. All layouts of one byte are possible here; plans have fewer.
ScaleLayout anyLayout(std::mt19937_64 &random, Quantization format) {
  return formatOf(format).scaleBytes() > 1 || random() % 2 ? ScaleLayout::plain
                                                           : static_cast<ScaleLayout>(1 + random() % 2);
}

/// Quantized matrices with their memory.
struct Matrices {
  Matrices(std::mt19937_64 &random, Quantization format, NumberFormat wide, bool filled)
      : quantized{format,
                  wide,
                  anyLayout(random, format),
                  1 + random() % 3,
                  1 + random() % (blockShape(format).rows > 1 ? 300 : 40),
                  blockShape(format).rows > 1 ? 1 + random() % 300 : blockShape(format).columns * (1 + random() % 12),
                  nullptr,
                  nullptr,
                  nullptr},
        codes(random, quantized.codeBytes()), scales(random, quantized.matrices * quantized.scaleBytes()),
        tensorScales(random, quantized.matrices * sizeof(float)) {
    if (blockShape(format).rows > 1 && random() % 2)
      quantized.columns = (quantized.columns + 7) / 8 * 8, codes = Memory(random, quantized.codeBytes()),
      scales = Memory(random, quantized.matrices * quantized.scaleBytes());
    point();
    if (filled) {
      for (uint64_t i = 0; i < quantized.codeBytes(); ++i)
        quantized.codes[i] = static_cast<std::byte>(random());
      for (uint64_t i = 0; i < quantized.matrices * quantized.scaleBytes(); ++i)
        quantized.scales[i] = static_cast<std::byte>(random());
      if (formatOf(format).scale == ScaleFormat::fp32)
        fillElements(random, NumberFormat::fp32, quantized.scales, quantized.matrices * quantized.scaleBytes() / 4);
    }
    for (uint64_t m = 0; m < quantized.matrices; ++m) {
      const float scale = random() % 16 == 0 ? NAN
                                             : std::ldexp(1.0f + static_cast<float>(random() % 100) / 100,
                                                          static_cast<int>(random() % 12) - 9);
      std::memcpy(quantized.tensorScales + 4 * m, &scale, 4);
    }
  }
  void point() {
    quantized.codes = codes.begin();
    quantized.scales = scales.begin();
    quantized.tensorScales = tensorScales.begin();
  }
  Quantized quantized;
  Memory codes, scales, tensorScales;
};

NumberFormat anyFormat(std::mt19937_64 &random, int count) {
  return static_cast<NumberFormat>(random() % static_cast<uint64_t>(count));
}

/// A rectangle of matrices, or a run through several rows, whose first column and width are multiples of `unit`;
/// strides count elements on one side.
struct Rectangle {
  Rectangle(std::mt19937_64 &random, const Quantized &of, uint64_t unit) {
    const uint64_t units = of.columns / unit;
    if (random() % 3 == 0 && of.matrices * of.rows * units > 1) { // a contiguous run across rows
      const uint64_t all = of.matrices * of.rows * units;
      first = random() % all;
      width = 1 + random() % (all - first);
      first *= unit;
      width *= unit;
      return;
    }
    const uint64_t left = random() % units, rowFirst = random() % (of.matrices * of.rows);
    width = (1 + random() % (units - left)) * unit;
    count = 1 + random() % (of.matrices * of.rows - rowFirst);
    step = of.columns;
    first = rowFirst * of.columns + left * unit;
    if (count > 1 && random() % 3 == 0) {
      step *= 2;
      count = (count + 1) / 2;
    }
  }
  uint64_t first, width, count = 1, step = 0;
};

struct Case {
  std::string what;
  Strided shape;
  Conversion conversion;
  std::byte *target = nullptr;
  const std::byte *source = nullptr;
  uint64_t unit = 1; // bytes; the range may be split at multiples of it
};

/// A random conversion of any kind, with all memory that it needs.
struct Random {
  explicit Random(uint64_t seed) : random(seed) {
    using Kind = StorageForm::Kind;
    const bool quantizes = random() % 2, reads = random() % 3 > 0;
    NumberFormat wide = anyFormat(random, 3);
    auto format = anyQuantization(random);
    uint64_t width = 0, count = 1;
    if (quantizes && random() % 4 == 0) { // blocks of several rows: whole rows of blocks
      format = anyQuantization(random, false);
      to.emplace_back(random, format, wide, false);
      const Quantized &q = to[0].quantized;
      const uint64_t height = blockShape(format).rows;
      const uint64_t below = (q.rows + height - 1) / height, first = random() % (q.matrices * below),
                     last = first + 1 + random() % (q.matrices * below - first);
      auto element = [&](uint64_t blockRow) {
        return (blockRow / below * q.rows + std::min(blockRow % below * height, q.rows)) * q.columns;
      };
      one.what = "quantizes rows of blocks " + std::to_string(static_cast<int>(format));
      base[1] = {q, q.codes};
      one.conversion.to = &base[1];
      one.conversion.write = {Kind::elements, wide, NumberFormat::fp8_e4m3, itemBytes(wide)};
      one.shape.rowBytes = (element(last) - element(first)) * itemBytes(wide);
      one.unit = one.shape.rowBytes;
      one.target = q.codes + element(first);
      plain.emplace_back(random, one.shape.rowBytes);
      fillElements(random, wide, plain[0].begin(), one.shape.rowBytes / itemBytes(wide));
      one.source = plain[0].begin();
      return;
    }
    if (quantizes) {
      format = anyQuantization(random, true);
      to.emplace_back(random, format, wide, false);
      const Quantized &q = to[0].quantized;
      const Rectangle part(random, q, blockShape(format).columns);
      base[1] = {q, q.codes};
      one.conversion.to = &base[1];
      one.conversion.write = {Kind::elements, wide, NumberFormat::fp8_e4m3,
                              itemBytes(wide) * blockShape(format).columns};
      width = part.width;
      count = part.count;
      one.target = q.codes + part.first;
      one.shape.loops[0].targetStride = static_cast<int64_t>(part.step);
      one.unit = one.conversion.write.block;
      one.what = "quantizes " + std::to_string(static_cast<int>(format));
    }
    if (reads) {
      from.emplace_back(random, quantizes ? anyQuantization(random) : format, wide, true);
      Quantized &q = from[0].quantized;
      const bool codes = !quantizes && formatOf(format).codesPerByte() == 1 && random() % 2;
      if (quantizes) { // the source is quantized too: as many rows as the target, from any column
        q.columns = (width + 64 + blockShape(q.format).columns - 1) / blockShape(q.format).columns *
                    blockShape(q.format).columns;
        q.rows = count + 2;
        q.matrices = 1;
        from[0].codes = Memory(random, q.codeBytes());
        from[0].scales = Memory(random, q.scaleBytes());
        from[0].point();
        for (uint64_t i = 0; i < q.codeBytes(); ++i)
          q.codes[i] = static_cast<std::byte>(random());
        for (uint64_t i = 0; i < q.scaleBytes(); ++i)
          q.scales[i] = static_cast<std::byte>(random() % 200);
        one.shape.loops[0].sourceStride = static_cast<int64_t>(q.columns);
        one.source = q.codes + random() % 2 * q.columns + random() % 64;
      } else {
        const Rectangle part(random, q, 1);
        width = part.width;
        count = part.count;
        one.source = q.codes + part.first;
        one.shape.loops[0].sourceStride = static_cast<int64_t>(part.step);
      }
      one.conversion.read = {Kind::elements, wide, NumberFormat::fp8_e4m3, itemBytes(wide)};
      base[0] = {q, q.codes};
      if (codes) {
        plain.emplace_back(random, q.elements() * itemBytes(wide));
        fillElements(random, wide, plain[0].begin(), q.elements());
        one.conversion.read = {Kind::codes, NumberFormat::fp8_e4m3, wide, 1};
        one.source = plain[0].begin() + (one.source - q.codes) * static_cast<int64_t>(itemBytes(wide));
        one.shape.loops[0].sourceStride *= static_cast<int64_t>(itemBytes(wide));
        base[0] = {q, plain[0].begin()};
      }
      one.conversion.from = &base[0];
      one.what += codes ? " codes" : " dequantizes";
      one.unit = std::max(one.unit, one.conversion.read.item());
      if (!quantizes && !codes && random() % 2) {
        NumberFormat other = anyFormat(random, 5);
        other = other == wide ? static_cast<NumberFormat>((static_cast<int>(wide) + 1) % 5) : other;
        one.conversion.write = castForm(wide, other);
      }
    } else if (!quantizes) {
      wide = anyFormat(random, 5);
      const auto other = static_cast<NumberFormat>((static_cast<uint64_t>(wide) + 1 + random() % 4) % 5);
      one.conversion.write = castForm(wide, other);
      one.unit = itemBytes(wide);
      width = 1 + random() % 300;
      count = 1 + random() % 9;
      one.what = "casts";
    }
    const uint64_t item = (one.conversion.read ? one.conversion.read : one.conversion.write).item();
    one.shape.rowBytes = width * item;
    one.shape.loopCount = count > 1 ? 1 : 0;
    one.shape.loops[0].count = count;
    if (!one.conversion.read) {
      const uint64_t stride = width + (random() % 2 ? random() % 20 : 0);
      plain.emplace_back(random, count * stride * item);
      fillElements(random, wide, plain.back().begin(), count * stride);
      one.source = random() % 12 == 0 && one.conversion.write.kind == Kind::elements ? nullptr : plain.back().begin();
      one.shape.loops[0].sourceStride = static_cast<int64_t>(stride * item);
    }
    if (!quantizes) {
      const auto stored = static_cast<uint64_t>(one.conversion.write.scale(static_cast<int64_t>(item)));
      const uint64_t stride = width + (random() % 2 ? random() % 20 : 0);
      plain.emplace_back(random, count * stride * stored);
      one.target = plain.back().begin();
      one.shape.loops[0].targetStride = static_cast<int64_t>(stride * stored);
    }
  }

  /// All memory that may be written.
  std::vector<Bytes *> written() {
    std::vector<Bytes *> all;
    for (Matrices &matrices : to)
      all.insert(all.end(), {&matrices.codes.all(), &matrices.scales.all()});
    for (Memory &memory : plain)
      all.push_back(&memory.all());
    return all;
  }

  std::mt19937_64 random;
  std::vector<Matrices> from, to;
  std::vector<Memory> plain;
  ViewBase base[2];
  Case one;
};

/// Parameter: whether the GPU code runs.
class ConversionTables : public testing::TestWithParam<bool> {
protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    if (GetParam())
      GTEST_SKIP() << "ThreadSanitizer does not support the coroutines that run the lanes";
#endif
  }

  static void run(std::mt19937_64 &random, const ConversionTable &table) {
    const auto blocks = static_cast<uint32_t>(1 + random() % 5);
    std::vector<uint32_t> order(blocks * (kBlockThreads / kWarpThreads));
    for (uint32_t i = 0; i < order.size(); ++i)
      order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (const uint32_t i : order)
      if (GetParam())
        ASSERT_EQ(reshard::tests::convertWarpOfLanes(table.view(), i % blocks, blocks, i / blocks), "");
      else
        convertWarp(table.view(), i % blocks, blocks, i / blocks, 0);
  }
};
INSTANTIATE_TEST_SUITE_P(Code, ConversionTables, testing::Bool(),
                         [](const auto &code) { return code.param ? "OfAGpu" : "OfTheHost"; });

} // namespace

TEST(Codes, EqualTheFormats) {
  auto check = []<NumberFormat Of>(std::integral_constant<NumberFormat, Of>) {
    const uint32_t codes = Of == NumberFormat::fp32 ? 0 : 1u << encoding(Of).bits;
    for (uint32_t code = 0; code < codes; ++code) {
      const float value = decode(Of, code), mine = std::bit_cast<float>(decodeBits<Of>(code));
      ASSERT_TRUE(std::isnan(value) ? std::isnan(mine) && std::signbit(value) == std::signbit(mine)
                                    : std::bit_cast<uint32_t>(value) == std::bit_cast<uint32_t>(mine))
          << code;
    }
    for (const Overflow overflow : {Overflow::saturate, Overflow::infinity})
      for (uint64_t high = 0; high < 1 << 16; ++high)
        for (const uint32_t low : {0u, 1u, 0x1000u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
          const uint32_t bits = static_cast<uint32_t>(high << 16) | low;
          ASSERT_EQ(encodeBits<Of>(bits, overflow), encode(Of, std::bit_cast<float>(bits), overflow))
              << std::hex << bits << " to format " << static_cast<int>(Of);
        }
  };
  check(std::integral_constant<NumberFormat, NumberFormat::fp32>());
  check(std::integral_constant<NumberFormat, NumberFormat::bf16>());
  check(std::integral_constant<NumberFormat, NumberFormat::fp16>());
  check(std::integral_constant<NumberFormat, NumberFormat::fp8_e4m3>());
  check(std::integral_constant<NumberFormat, NumberFormat::fp8_e5m2>());
  check(std::integral_constant<NumberFormat, NumberFormat::fp4_e2m1>());
  check(std::integral_constant<NumberFormat, NumberFormat::int4>());
}

TEST_P(ConversionTables, WarpsEqualTheCpuKernels) {
  const uint64_t cases = std::getenv("RESHARD_FULL") ? 60'000 : 6000;
  std::map<std::string, int> kinds;
  for (uint64_t seed = 0; seed < cases; ++seed) {
    Random all(seed);
    const Case &one = all.one;
    ++kinds[one.what];
    const std::vector<Bytes *> memory = all.written();
    std::vector<Bytes> before, expected;
    for (const Bytes *each : memory)
      before.push_back(*each);
    convertRows({one.target, one.source, one.shape, 0, one.shape.rows()}, one.conversion);
    for (size_t m = 0; m < memory.size(); ++m) {
      expected.push_back(*memory[m]);
      *memory[m] = before[m];
    }
    ConversionTable table(seed % 3 == 0 ? 8 + seed % 50 : uint64_t{1} << 31);
    const uint64_t bytes = one.shape.bytes(),
                   cut = all.random() % 2 ? all.random() % (bytes / one.unit + 1) * one.unit : bytes;
    table.add(at(one.target), at(one.source), one.shape, one.conversion, {0, cut});
    table.add(at(one.target), at(one.source), one.shape, one.conversion, {cut, bytes - cut});
    ASSERT_EQ(table.bytes(), bytes);
    run(all.random, table);
    for (size_t m = 0; m < memory.size(); ++m)
      ASSERT_TRUE(*memory[m] == expected[m]) << "seed " << seed << ": " << one.what << ", memory " << m;
  }
  for (const char *kind : {" codes", " dequantizes", "casts"})
    EXPECT_GT(kinds[kind], 20) << kind;
  for (const QuantizedFormat &format : kQuantizedFormats) {
    const std::string number = std::to_string(static_cast<int>(format.number));
    if (format.blockRows > 1)
      EXPECT_GT(kinds["quantizes rows of blocks " + number], 20) << format.name;
    else
      EXPECT_GT(std::min(kinds["quantizes " + number], kinds["quantizes " + number + " dequantizes"]), 20)
          << format.name;
  }
}

TEST_P(ConversionTables, CastsOfEveryBf16Value) {
  std::mt19937_64 random(1);
  constexpr uint64_t kCount = 1 << 16;
  std::vector<uint16_t> values(kCount);
  for (uint64_t i = 0; i < kCount; ++i)
    values[i] = static_cast<uint16_t>(i * 40503); // an odd factor: every value once, in mixed order
  for (const NumberFormat other :
       {NumberFormat::fp32, NumberFormat::fp16, NumberFormat::fp8_e4m3, NumberFormat::fp8_e5m2}) {
    for (const OverflowRule rule : {OverflowRule::error, OverflowRule::saturate, OverflowRule::infinity}) {
      uint32_t overflowed[2] = {}; // of the CPU's kernels, of the table
      Conversion conversion;
      conversion.write = castForm(NumberFormat::bf16, other, rule);
      Strided shape;
      shape.rowBytes = 2 * kCount;
      const auto *source = reinterpret_cast<const std::byte *>(values.data());
      Bytes expected(kCount * itemBytes(other) + 16), found = expected;
      conversion.write.overflowed = rule == OverflowRule::error ? &overflowed[0] : nullptr;
      convertRows({expected.data(), source, shape, 0, 1}, conversion);
      conversion.write.overflowed = rule == OverflowRule::error ? &overflowed[1] : nullptr;
      ConversionTable table;
      table.add(at(found.data()), at(source), shape, conversion, {0, shape.rowBytes});
      run(random, table);
      ASSERT_TRUE(found == expected) << static_cast<int>(other);
      const uint32_t any = rule == OverflowRule::error && other != NumberFormat::fp32;
      EXPECT_EQ(overflowed[0], any) << static_cast<int>(other);
      EXPECT_EQ(overflowed[1], any) << static_cast<int>(other);
    }
  }
}

// Values around the end of each range: the table reports the same ones as the CPU's kernels.
TEST_P(ConversionTables, ReportsValuesBeyondTheRange) {
  std::mt19937_64 random(3);
  for (const NumberFormat other :
       {NumberFormat::bf16, NumberFormat::fp16, NumberFormat::fp8_e4m3, NumberFormat::fp8_e5m2})
    for (const uint32_t around : {0x7F7F8000u, 0x477FF000u, 0x43E80001u, 0x47700000u, 0x7F800000u})
      for (const uint32_t bits : {around - 2, around - 1, around, around + 1}) {
        std::vector<uint32_t> values(70, std::bit_cast<uint32_t>(1.0f));
        values[random() % values.size()] = bits | (random() % 2 ? 0x80000000 : 0);
        uint32_t overflowed[2] = {};
        Strided shape;
        shape.rowBytes = 4 * values.size();
        const auto *source = reinterpret_cast<const std::byte *>(values.data());
        Bytes target(values.size() * itemBytes(other) + 16);
        Conversion conversion;
        conversion.write = castForm(NumberFormat::fp32, other);
        conversion.write.overflowed = &overflowed[0];
        convertRows({target.data(), source, shape, 0, 1}, conversion);
        conversion.write.overflowed = &overflowed[1];
        ConversionTable table;
        table.add(at(target.data()), at(source), shape, conversion, {0, shape.rowBytes});
        run(random, table);
        EXPECT_EQ(overflowed[0], overflowed[1]) << std::hex << bits << " to format " << static_cast<int>(other);
        const float value = std::bit_cast<float>(bits);
        const bool beyond = !std::isnan(value) && (std::isfinite(value) || other == NumberFormat::fp8_e4m3) &&
                            !std::isfinite(decode(other, encode(other, value, Overflow::infinity)));
        EXPECT_EQ(overflowed[0], beyond) << std::hex << bits << " to format " << static_cast<int>(other);
      }
}

TEST_P(ConversionTables, ScalesOnlyAndScaleLayouts) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    const auto format = static_cast<Quantization>(seed % std::size(kQuantizedFormats));
    const NumberFormat wide = anyFormat(random, 3);
    Matrices matrices(random, format, wide, false);
    Memory elements(random, matrices.quantized.elements() * itemBytes(wide));
    fillElements(random, wide, elements.begin(), matrices.quantized.elements());
    const Bytes codes = matrices.codes.all(), empty = matrices.scales.all();
    scaleRows(matrices.quantized, elements.begin(), 0, matrices.quantized.blockRows());
    const Bytes scales = matrices.scales.all();
    matrices.scales.all() = empty;
    ConversionTable table;
    table.addScales(matrices.quantized, at(elements.begin()));
    run(random, table);
    ASSERT_TRUE(matrices.scales.all() == scales) << "seed " << seed << " format " << static_cast<int>(format);
    ASSERT_TRUE(matrices.codes.all() == codes);
    if (matrices.quantized.layout == ScaleLayout::plain)
      continue;
    Memory plain(random, matrices.quantized.matrices * matrices.quantized.scaleBytes()), other = plain;
    toPlainScales(matrices.quantized, plain.begin());
    Bytes expected = plain.all();
    plain.all() = other.all();
    ConversionTable back, padding, forth;
    back.addToPlain(matrices.quantized, at(plain.begin()));
    run(random, back);
    ASSERT_TRUE(plain.all() == expected) << "seed " << seed;
    padding.addPadding(matrices.quantized);
    run(random, padding);
    const Bytes padded = matrices.scales.all();
    matrices.scales.all() = empty;
    fromPlainScales(matrices.quantized, plain.begin());
    ASSERT_TRUE(matrices.scales.all() == padded) << "seed " << seed;
    matrices.scales.all() = empty;
    forth.addFromPlain(matrices.quantized, at(plain.begin()));
    run(random, forth);
    ASSERT_TRUE(matrices.scales.all() == padded) << "seed " << seed;
  }
}

TEST_P(ConversionTables, AmaxAndTensorScales) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    const NumberFormat wide = anyFormat(random, 3);
    const uint64_t item = itemBytes(wide);
    Matrices matrices(random, static_cast<Quantization>(seed % std::size(kQuantizedFormats)), wide, true);
    const Quantized &q = matrices.quantized;
    const Rectangle part(random, q, 1);
    Memory elements(random, q.elements() * item);
    if (seed % 2)
      fillElements(random, wide, elements.begin(), q.elements());
    else
      decodeElements(q, {0, q.elements()}, elements.begin());
    Strided shape;
    shape.rowBytes = part.width * item;
    shape.loopCount = 1;
    shape.loops[0] = {part.count, static_cast<int64_t>(part.step * item), 0};
    const float expected = amax(wide, elements.begin() + part.first * item,
                                {part.count, part.width, 0, static_cast<int64_t>(part.step * item)});
    alignas(16) float numbers[4] = {0, 0, 0, 0};
    ConversionTable table(seed % 5 == 0 ? 8 : uint64_t{1} << 31);
    if (seed % 2)
      table.addAmax(at(reinterpret_cast<std::byte *>(numbers + 1)), wide, at(elements.begin()) + part.first * item,
                    shape, nullptr);
    else
      table.addAmax(at(reinterpret_cast<std::byte *>(numbers + 1)), wide, part.first * item, shape, &q);
    run(random, table);
    ASSERT_EQ(std::bit_cast<uint32_t>(numbers[1]), std::bit_cast<uint32_t>(expected)) << "seed " << seed;
    numbers[3] = seed % 4 == 0 ? INFINITY : 3;
    float scales[2];
    ConversionTable scaling;
    scaling.addTensorScales(at(reinterpret_cast<std::byte *>(scales)), at(reinterpret_cast<std::byte *>(numbers)), 2,
                            2);
    run(random, scaling);
    EXPECT_EQ(std::bit_cast<uint32_t>(scales[0]), std::bit_cast<uint32_t>(nvfp4TensorScale(expected)));
    EXPECT_EQ(std::bit_cast<uint32_t>(scales[1]), std::bit_cast<uint32_t>(nvfp4TensorScale(seed % 4 == 0 ? NAN : 3)));
  }
}
