// SPDX-License-Identifier: Apache-2.0
// Benchmarks of pack, unpack, conversions and a whole refit, compared with a device-to-device copy of as many bytes.
// Both are recorded and replayed in the same way, alternately.

#include "executor/transports/device_rounds.h"
#include "tests/gpu/plan_on_gpu.h"
#include "tests/lib/times.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>

namespace reshard::gpu {

namespace {

using tests::median;
using tests::now;

/// Targets, as ratios to the copy: rows of 4 KiB and more, conversions, a refit; and the host seconds of a replay.
constexpr double kPackTarget = 0.85, kConvertTarget = 0.80, kRefitTarget = 1.10, kHostSeconds = 20e-6;
/// RESHARD_TINY: the smallest sizes that run all code, for a simulated GPU; the figures are then meaningless.
const bool kTiny = std::getenv("RESHARD_TINY");
const int kRepeats = kTiny ? 1 : 8, kReplays = kTiny ? 1 : 15;
const uint64_t kPayload = uint64_t{1} << (kTiny ? 20 : 30), kSmallEntries = kTiny ? 90 : 100'000;

/// Operations recorded on their own device.
class Recording {
public:
  template <class Record> Recording(Record record, int repeats) : repeats_(repeats) {
    device_ = need(openDevice("cuda", -1));
    std::vector<Operation> operations;
    for (int r = 0; r < repeats; ++r)
      record(*device_, operations);
    need(device_->record(operations, nullptr, {}));
    replay();
  }
  void replay() {
    const double begin = now();
    need(device_->replay());
    host.push_back(now() - begin);
    while (!need(device_->done())) {
    }
    seconds.push_back((now() - begin) / repeats_);
  }
  std::vector<double> host, seconds;

private:
  std::unique_ptr<Device> device_;
  const int repeats_;
};

/// Replays both alternately. Returns the time of `theirs` divided by that of `ours`, and the seconds of `ours`.
std::pair<double, double> compare(Recording &ours, Recording &theirs) {
  for (int i = 0; i < kReplays; ++i) {
    ours.replay();
    theirs.replay();
  }
  return {median(theirs.seconds) / median(ours.seconds), median(ours.seconds)};
}

auto copyOf(std::byte *target, const std::byte *source, uint64_t bytes) {
  return [=](Device &device, std::vector<Operation> &operations) {
    operations.push_back(Call([=, &device]() -> Status {
      const cudaError_t error =
          cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(device.stream()));
      return error == cudaSuccess ? Status() : failed(cudaGetErrorString(error));
    }));
  };
}

auto tableOf(const kernels::CopyTable &table) {
  return [&table](Device &, std::vector<Operation> &operations) {
    operations.push_back(Tables{table, kernels::ConversionTable(), kernels::CopyTable()});
  };
}

/// Device memory with random contents.
std::byte *randomMemory(Device &device, uint64_t bytes) {
  std::byte *const memory = need(device.allocate(bytes));
  static const std::vector<uint64_t> block = [] {
    std::vector<uint64_t> values(std::min<uint64_t>(8 << 20, kPayload / 8));
    std::mt19937_64 random(1);
    std::generate(values.begin(), values.end(), std::ref(random));
    return values;
  }();
  for (uint64_t at = 0; at < bytes; at += block.size() * 8)
    need(device.copy(memory + at, reinterpret_cast<const std::byte *>(block.data()),
                     std::min<uint64_t>(block.size() * 8, bytes - at)));
  return memory;
}

bool benchRows(Device &memory) {
  bool met = true;
  std::byte *strided = randomMemory(memory, 2 * kPayload), *packed = randomMemory(memory, kPayload),
            *other = randomMemory(memory, kPayload);
  Recording copy(copyOf(other, packed, kPayload), kRepeats);
  std::printf("  %-28s %12s %12s\n", "1 GiB in rows of", "pack / copy", "unpack / copy");
  for (uint64_t row = 16; row <= std::min<uint64_t>(4 << 20, kPayload); row *= row < 16384 ? 2 : 16) {
    kernels::Strided shape;
    shape.rowBytes = row;
    shape.loopCount = 1;
    shape.loops[0] = {kPayload / row, static_cast<int64_t>(2 * row), static_cast<int64_t>(row)};
    kernels::CopyTable pack, unpack;
    pack.add(reinterpret_cast<uint64_t>(packed), reinterpret_cast<uint64_t>(strided), shape);
    std::swap(shape.loops[0].sourceStride, shape.loops[0].targetStride);
    unpack.add(reinterpret_cast<uint64_t>(strided), reinterpret_cast<uint64_t>(packed), shape);
    Recording packing(tableOf(pack), kRepeats), unpacking(tableOf(unpack), kRepeats);
    const double out = compare(packing, copy).first, in = compare(unpacking, copy).first;
    const bool below = row >= 4096 && std::min(out, in) < kPackTarget;
    met = met && !below;
    std::printf("  %-28llu %12.3f %12.3f%s\n", static_cast<unsigned long long>(row), out, in,
                below ? "   BELOW 0.85" : "");
  }
  // One large entry and a hundred thousand small ones: neither may delay the other.
  kernels::CopyTable mixed;
  kernels::Strided large, small;
  large.rowBytes = kPayload / 2;
  small.rowBytes = 5232;
  mixed.add(reinterpret_cast<uint64_t>(packed), reinterpret_cast<uint64_t>(strided), large);
  for (uint64_t i = 0; i < kSmallEntries; ++i)
    mixed.add(reinterpret_cast<uint64_t>(packed + kPayload / 2 + i * small.rowBytes),
              reinterpret_cast<uint64_t>(strided + kPayload / 2 + i * 10'000), small);
  Recording mixing(tableOf(mixed), kRepeats), same(copyOf(other, packed, mixed.bytes()), kRepeats);
  const double ratio = compare(mixing, same).first;
  std::printf("  %-28s %12.3f%s\n", "1 large entry, 100,000 small", ratio, ratio < kPackTarget ? "   BELOW 0.85" : "");
  std::printf("  the copy: %.0f GB/s\n", static_cast<double>(kPayload) / median(copy.seconds) / 1e9);
  return met && ratio >= kPackTarget;
}

/// Conversions of a bf16 matrix in both directions, compared with a copy with the same total of bytes read and written.
bool benchConversions(Device &memory) {
  using namespace kernels;
  const uint64_t kColumns = kTiny ? 512 : 16384, kRows = kColumns, kElements = kRows * kColumns;
  std::byte *wide = randomMemory(memory, kElements * 4), *stored = randomMemory(memory, kElements * 4),
            *scales = randomMemory(memory, kElements / 4);
  bool met = true;
  std::printf("  %-28s %12s\n", "16384 x 16384 of bf16", "/ copy");
  auto compareWith = [&](const char *what, uint64_t bytes, const ConversionTable &table) {
    Recording converting(
        [&](Device &, std::vector<Operation> &operations) {
          operations.push_back(Tables{CopyTable(), table, CopyTable()});
        },
        kRepeats);
    Recording copy(copyOf(wide, stored, bytes / 2), kRepeats);
    const double ratio = compare(converting, copy).first;
    met = met && ratio >= kConvertTarget;
    std::printf("  %-28s %12.3f%s\n", what, ratio, ratio < kConvertTarget ? "   BELOW 0.80" : "");
  };
  const auto source = reinterpret_cast<uint64_t>(wide), target = reinterpret_cast<uint64_t>(stored);
  Strided all;
  all.rowBytes = kElements * 2;
  for (const auto &[what, to] : {std::pair("to fp32", NumberFormat::fp32), std::pair("to fp16", NumberFormat::fp16),
                                 std::pair("to fp8_e4m3", NumberFormat::fp8_e4m3)}) {
    ConversionTable table;
    table.add(target, source, all, {{}, castForm(NumberFormat::bf16, to), nullptr, nullptr}, {0, all.rowBytes});
    compareWith(what, kElements * (2 + itemBytes(to)), table);
  }
  const std::pair<const char *, Quantized> kinds[] = {
      {"mxfp8",
       {Quantization::mxfp8, NumberFormat::bf16, ScaleLayout::plain, 1, kRows, kColumns, stored, scales, scales}},
      {"mxfp8, swizzled",
       {Quantization::mxfp8, NumberFormat::bf16, ScaleLayout::swizzled, 1, kRows, kColumns, stored, scales, scales}},
      {"block_fp8",
       {Quantization::block_fp8, NumberFormat::bf16, ScaleLayout::plain, 1, kRows, kColumns, stored, scales, scales}},
      {"nvfp4",
       {Quantization::nvfp4, NumberFormat::bf16, ScaleLayout::plain, 1, kRows, kColumns, stored, scales,
        scales + kElements / 8}}};
  for (const auto &[name, matrices] : kinds) {
    const ViewBase base{matrices, stored};
    const StorageForm form{StorageForm::Kind::elements, NumberFormat::bf16, NumberFormat::fp8_e4m3, 2};
    const uint64_t bytes = kElements * 2 + matrices.codeBytes() + matrices.scaleBytes();
    ConversionTable quantize, dequantize;
    quantize.add(target, source, all, {{}, form, nullptr, &base}, {0, all.rowBytes});
    compareWith(("to " + std::string(name)).c_str(), bytes, quantize);
    dequantize.add(source, target, all, {form, {}, &base, nullptr}, {0, all.rowBytes});
    compareWith(("from " + std::string(name)).c_str(), bytes, dequantize);
  }
  return met;
}

bool benchRefit(Device &memory, const std::string &path) {
  std::unique_ptr<Plan> plan;
  need(Plan::open(path, plan));
  std::vector<LocalRank> ranks;
  std::vector<std::vector<std::vector<std::byte *>>> tables(plan->world());
  uint64_t bytes = 0;
  for (uint32_t r = 0; r < plan->world(); ++r) {
    LocalRank &rank = ranks.emplace_back();
    rank.rank = r;
    need(plan->segment(r, rank.segment));
    for (const schema::BufferRange *run : *rank.segment->buffers()) {
      auto &table = tables[r].emplace_back();
      for (uint32_t i = 0; i < run->count(); ++i)
        table.push_back(randomMemory(memory, run->bytes()));
    }
    for (const auto &table : tables[r])
      rank.memory.push_back(table.data());
  }
  std::vector<Operation> operations;
  need(addDependencyLevels(*plan, ranks, operations, bytes));
  std::byte *source = randomMemory(memory, bytes), *target = randomMemory(memory, bytes);
  Recording refit(
      [&](Device &, std::vector<Operation> &all) { all.insert(all.end(), operations.begin(), operations.end()); }, 1);
  Recording copy(copyOf(target, source, bytes), 1);
  const auto [ratio, seconds] = compare(refit, copy);
  const double host = median(refit.host);
  std::printf("  refit of %.2f GB in %zu launches: %.3f ms, %.3f times the copy's%s\n",
              static_cast<double>(bytes) / 1e9, operations.size(), seconds * 1e3, 1 / ratio,
              1 / ratio > kRefitTarget ? "   ABOVE 1.10" : "");
  std::printf("  host time of a replay: %.1f us%s\n", host * 1e6, host > kHostSeconds ? "   ABOVE 20" : "");
  return 1 / ratio <= kRefitTarget && host <= kHostSeconds;
}

} // namespace

bool bench(const std::string &path) {
  bool met = true;
  {
    const std::unique_ptr<Device> memory = need(openDevice("cuda", -1));
    met = benchRows(*memory);
  }
  {
    const std::unique_ptr<Device> memory = need(openDevice("cuda", -1));
    met = benchConversions(*memory) && met;
  }
  const std::unique_ptr<Device> memory = need(openDevice("cuda", -1));
  return benchRefit(*memory, path) && met;
}

} // namespace reshard::gpu
