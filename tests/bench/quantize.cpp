// SPDX-License-Identifier: Apache-2.0
// Refits that quantize or dequantize, compared with the naive method: the same refit without conversion into wide
// buffers, and a pass of the same kernels over them (for a quantized source, before it); and with memcpy of the
// source's bytes. All use the same number of threads, on memory touched before, alternately in one run. Quote the
// ratios, not the rates, which count bytes of the wide values. Before measuring, both methods must leave the same
// bytes.
//   bench-quantize [--benchmark_filter=…]

#include "kernels/cpu/quantized.h"
#include "tests/bench/prepared.h"

#include <benchmark/benchmark.h>

#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string_view>

using namespace reshard;
using namespace reshard::bench;
using namespace reshard::kernels;

namespace {

constexpr const char *kJob = "tests/bench/llama3-8b-8-to-4.yaml";

/// The format of the matrices of one side, and the layout of their scales.
struct StorageFormat {
  Quantization format;
  ScaleLayout layout = ScaleLayout::plain;
};

struct Case {
  const char *name;
  std::vector<std::string> overrides;
  std::optional<StorageFormat> source, target;
};

/// One conversion pass over all matrices of one side, between the wide params of a plain job and the params of a
/// quantized one.
class Pass {
public:
  Pass(StorageFormat storage, const std::vector<Bound> &wide, const std::vector<Bound> &quantized) {
    std::map<std::pair<uint32_t, std::string>, std::byte *> named;
    for (const Bound &param : quantized)
      named[{param.rank, param.instance.name}] = param.memory;
    const std::string scale = storage.format == Quantization::block_fp8 ? "_scale_inv" : "_scale";
    for (const Bound &param : wide) {
      if (param.instance.shape.size() < 2)
        continue;
      Quantized matrix{.format = storage.format, .layout = storage.layout};
      matrix.rows = static_cast<uint64_t>(param.instance.shape[0]);
      matrix.columns = static_cast<uint64_t>(param.instance.shape[1]);
      matrix.codes = named.at({param.rank, param.instance.name});
      matrix.scales = named.at({param.rank, param.instance.name + scale});
      if (storage.format == Quantization::nvfp4)
        matrix.tensorScales = named.at({param.rank, param.instance.name + "_scale_2"});
      const uint64_t row = blockShape(storage.format).rows * matrix.columns * itemBytes(matrix.wide),
                     each = std::max<uint64_t>(1, (1 << 20) / row);
      for (uint64_t first = 0; first < matrix.blockRows(); first += each)
        parts_.push_back(
            {matrix, param.memory, first, std::min(each, matrix.blockRows() - first), &amax_[param.instance.name]});
    }
  }

  void quantize() const {
    if (parts_[0].matrix.format == Quantization::nvfp4)
      findTensorScales();
    forEach([](const Part &part) { quantizeRows(part.matrix, part.wide, part.first, part.count, {.stream = true}); });
  }
  void dequantize() const {
    forEach([](const Part &part) {
      const uint64_t element = part.first * part.matrix.columns; // for formats whose blocks have one row
      decodeElements(part.matrix, {element, part.count * part.matrix.columns},
                     part.wide + element * itemBytes(part.matrix.wide), {.stream = true});
    });
  }

  /// Returns a hash of all codes and scales.
  size_t hash() const {
    size_t all = 0;
    forEachMatrix([&](const Quantized &m) {
      for (const auto &[memory, bytes] : ranges(m))
        all = all * 31 + std::hash<std::string_view>()({reinterpret_cast<const char *>(memory), bytes});
    });
    return all;
  }
  void clear() const {
    forEachMatrix([](const Quantized &m) {
      for (const auto &[memory, bytes] : ranges(m))
        std::memset(memory, 0, bytes);
    });
  }

private:
  /// Rows of blocks of a matrix, about 1 MiB.
  struct Part {
    Quantized matrix;
    std::byte *wide;
    uint64_t first, count;
    float *amax; // of the matrix on all ranks
  };
  static std::vector<std::pair<std::byte *, uint64_t>> ranges(const Quantized &m) {
    std::vector<std::pair<std::byte *, uint64_t>> all = {{m.codes, m.codeBytes()}, {m.scales, m.scaleBytes()}};
    if (m.tensorScales)
      all.emplace_back(m.tensorScales, sizeof(float));
    return all;
  }
  template <class Work> void forEach(Work work) const {
    parallelFor(parts_.size(), threads(), [&](size_t i) { work(parts_[i]); });
  }
  template <class Work> void forEachMatrix(Work work) const {
    for (const Part &part : parts_)
      if (part.first == 0)
        work(part.matrix);
  }
  void findTensorScales() const {
    std::vector<float> found(parts_.size());
    parallelFor(parts_.size(), threads(), [&](size_t i) {
      const auto &[m, wide, first, count, matrixAmax] = parts_[i];
      found[i] = amax(m.wide, wide + first * m.columns * itemBytes(m.wide), {1, count * m.columns, 0, 0});
    });
    for (const Part &part : parts_)
      *part.amax = 0;
    for (size_t i = 0; i < parts_.size(); ++i)
      *parts_[i].amax = std::max(*parts_[i].amax, found[i]);
    for (const Part &part : parts_) {
      const float scale = nvfp4TensorScale(*part.amax);
      std::memcpy(part.matrix.tensorScales, &scale, sizeof scale);
    }
  }

  std::vector<Part> parts_;
  mutable std::map<std::string, float> amax_; // by the param's name
};

/// Fills params with a normal distribution as wide as that of usual weights, in bf16.
void fillWeights(const std::vector<Bound> &params) {
  // Repeated, because drawing all values would take longer than the benchmark. The odd period makes the blocks differ.
  constexpr size_t kPeriod = (1 << 20) + 3;
  std::mt19937_64 random(1);
  std::normal_distribution<float> weight(0, 0.02f);
  std::vector<uint16_t> weights(kPeriod);
  for (uint16_t &each : weights)
    each = static_cast<uint16_t>(encode(NumberFormat::bf16, weight(random), Overflow::saturate));
  for (const Bound &param : params)
    for (size_t at = 0; at < param.bytes(); at += kPeriod * sizeof(uint16_t))
      std::memcpy(param.memory + at, weights.data(), std::min(param.bytes() - at, kPeriod * sizeof(uint16_t)));
}

/// Copies wide params to the params of the same name, except quantized ones.
void copyLike(const std::vector<Bound> &from, const std::vector<Bound> &to) {
  std::map<std::pair<uint32_t, std::string>, const Bound *> named;
  for (const Bound &param : from)
    named[{param.rank, param.instance.name}] = &param;
  for (const Bound &param : to)
    if (const auto at = named.find({param.rank, param.instance.name});
        at != named.end() && at->second->type == param.type)
      std::memcpy(param.memory, at->second->memory, param.bytes());
}

/// Runs reshard, the naive method and memcpy alternately; one iteration is one of each.
void paired(benchmark::State &state, const Case &each) {
  static const std::unique_ptr<Prepared> plain = [] {
    auto prepared = std::make_unique<Prepared>(kJob, std::vector<std::string>{});
    fillWeights(prepared->sources);
    return prepared;
  }();
  Prepared ours(kJob, each.overrides);
  std::optional<Pass> before, behind;
  copyLike(plain->sources, ours.sources);
  if (each.source)
    before.emplace(*each.source, plain->sources, ours.sources).quantize();
  if (each.target)
    behind.emplace(*each.target, plain->targets, ours.targets);
  auto naive = [&] {
    const double begin = command::now();
    if (before)
      before->dequantize();
    plain->refit();
    if (behind)
      behind->quantize();
    return command::now() - begin;
  };
  const Copy copy(ours.sources, plain->targets, bytesOf(ours.sources));
  naive();
  if (behind) {
    const size_t expected = behind->hash();
    behind->clear();
    ours.refit();
    // Quantizing dequantized values may give other codes: if the block's largest code was rounded down, its scale may
    // become smaller.
    if (!before && behind->hash() != expected)
      fail(std::string(each.name) + ": codes or scales differ from those of the naive method");
  } else {
    for (const Bound &param : ours.targets)
      std::memset(param.memory, 0, param.bytes());
    ours.refit();
    for (size_t i = 0; i < ours.targets.size(); ++i)
      if (std::memcmp(ours.targets[i].memory, plain->targets[i].memory, ours.targets[i].bytes()) != 0)
        fail(std::string(each.name) + ": " + ours.targets[i].instance.name + " differs from the naive method's");
  }
  ours.refit();
  copy.run();
  std::vector<double> refits, naives, copies;
  for (auto _ : state) {
    refits.push_back(ours.refit());
    naives.push_back(naive());
    copies.push_back(copy.run());
  }
  const auto bytes = static_cast<double>(plain->bytes());
  state.counters["ours_GB/s"] = bytes / median(refits) / 1e9;
  state.counters["naive_GB/s"] = bytes / median(naives) / 1e9;
  state.counters["memcpy_GB/s"] = bytes / median(copies) / 1e9;
  state.counters["ours/naive"] = median(naives) / median(refits);
  state.counters["ours/memcpy"] = median(copies) / median(refits);
  state.counters["moved_MiB"] = static_cast<double>(ours.bytes()) / (1 << 20);
  state.counters["threads"] = threads();
}

const std::vector<Case> &cases() {
  constexpr StorageFormat mxfp8{Quantization::mxfp8}, swizzled{Quantization::mxfp8, ScaleLayout::swizzled},
      blockFp8{Quantization::block_fp8}, nvfp4{Quantization::nvfp4};
  static const std::vector<Case> all = {
      {"plain", {}, {}, {}},
      {"mxfp8", {"target.quantize=mxfp8"}, {}, mxfp8},
      {"mxfp8/swizzled", {"target.quantize={format: mxfp8, scale_layout: swizzled}"}, {}, swizzled},
      {"mxfp8/sender", {"target.quantize={format: mxfp8, by: sender}"}, {}, mxfp8},
      {"block_fp8", {"target.quantize=block_fp8"}, {}, blockFp8}, // converted by the sender
      {"block_fp8/receiver",
       {"target.quantize={format: block_fp8, by: receiver}", "options.staging=64MiB"},
       {},
       blockFp8},
      {"nvfp4", {"target.quantize=nvfp4"}, {}, nvfp4},
      {"mxfp8-to-plain", {"source.quantize=mxfp8"}, mxfp8, {}},
      {"mxfp8-to-mxfp8", {"source.quantize=mxfp8", "target.quantize=mxfp8"}, mxfp8, mxfp8},
  };
  return all;
}

} // namespace

int main(int argc, char **argv) {
  for (const Case &each : cases())
    benchmark::RegisterBenchmark(each.name, paired, each)->Iterations(11)->Unit(benchmark::kMillisecond);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv))
    return 1;
  benchmark::RunSpecifiedBenchmarks();
}
