// SPDX-License-Identifier: Apache-2.0
// Comparisons of targets with sources: every wrong element is found, also in rows that are compared as a whole;
// replicas that differ are named; values of a tensor are found in whatever order and size its ranges come.

#include "tests/lib/threads.h"
#include "tests/verify/support.h"
#include "verify/check/check.h"
#include "verify/check/compare.h"
#include "verify/check/synthesize.h"
#include "verify/check/tensor_values.h"

#include <gmock/gmock.h>

#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>

using namespace reshard;
using namespace reshard::tests;
using namespace reshard::tools;
using namespace reshard::verify;
namespace fbs = reshard::schema;

namespace {

TEST(TensorValues, EqualAMapOfTheElements) {
  constexpr int64_t kElements = 3000;
  std::mt19937_64 random(7);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); };
  for (int round = 0; round < 300; ++round) {
    const auto item = int64_t{1} << below(4);
    std::vector<std::byte> memory(static_cast<size_t>(kElements * item)); // element i at place i, of all instances
    for (std::byte &each : memory)
      each = static_cast<std::byte>(random());
    TensorValues values;
    std::map<int64_t, int> times;
    for (int64_t ranges = below(30); ranges >= 0; --ranges) {
      fbs::ElementRange range;
      range.logicalStep = range.localStep = below(3) == 0 ? 1 + below(20) : 1;
      range.count = 1 + below(below(2) ? 20 : 500);
      range.logical = range.local = below(kElements - (range.count - 1) * range.logicalStep > 0
                                              ? kElements - (range.count - 1) * range.logicalStep
                                              : 1);
      range.count = std::min(range.count, (kElements - 1 - range.logical) / range.logicalStep + 1);
      if (below(2))
        values.refer(range, memory.data(), item);
      else
        values.put(range, memory.data(), item, false);
      for (int64_t k = 0; k < range.count; ++k)
        ++times[range.at(k).logical];
    }
    EXPECT_EQ(values.finish(),
              std::any_of(times.begin(), times.end(), [](const auto &each) { return each.second > 1; }));
    for (int64_t element = 0; element < kElements + 100;) {
      const ValueSpan found = values.span(element, 1 + below(kElements), item);
      ASSERT_GT(found.count, 0);
      for (int64_t k = 0; k < found.count; ++k, ++element) {
        ASSERT_EQ(found.data != nullptr, times.count(element) > 0) << element;
        if (found.data) {
          ASSERT_EQ(std::memcmp(found.data + k * item, memory.data() + element * item, static_cast<size_t>(item)), 0);
        }
      }
    }
  }
}

TEST(TensorValues, LongRangesAreNotCopied) {
  const std::vector<std::byte> memory(4096);
  fbs::ElementRange row;
  row.count = 256;
  TensorValues values;
  for (int64_t r = 0; r < 8; ++r, row.logical += 256, row.local += 256)
    values.refer(row, memory.data(), 2);
  row.count = 4;
  values.refer(row, memory.data() - 512, 2); // short, and not contiguous with the rows before
  values.finish();
  EXPECT_EQ(values.copiedBytes(), 8u);
  const ValueSpan all = values.span(0, 4000, 2);
  EXPECT_EQ(all.count, 2048);
  EXPECT_EQ(all.data, memory.data());
}

TEST(TensorValues, CopiesThatMustAgree) {
  std::vector<std::byte> memory(64);
  fbs::ElementRange row;
  row.count = 16;
  TensorValues values;
  values.put(row, memory.data(), 2, true);
  EXPECT_EQ(values.conflict(), -1);
  memory[11] = std::byte{1};
  row.logical = row.local = 3;
  values.put(row, memory.data(), 2, true); // elements 3 to 18, of which 16 to 18 are new
  EXPECT_EQ(values.conflict(), 5);
  EXPECT_EQ(values.span(0, 100, 2).count, 19);
  EXPECT_EQ(values.span(5, 1, 2).data[1], std::byte{1}) << "the last value remains";
  row = {nullptr, -1, 9, -1, 9, -1, 5};
  memory[18] = std::byte{1};
  TensorValues backwards;
  backwards.put(row, memory.data(), 2, true);
  memory[12] = std::byte{1};
  backwards.put(row, memory.data(), 2, true);
  EXPECT_EQ(backwards.conflict(), 6);
}

/// Elements of an instance, by their places.
std::map<int64_t, std::pair<std::string, int64_t>> elementsOf(const fbs::InstanceLayout &layout, const Places *places) {
  std::map<int64_t, std::pair<std::string, int64_t>> elements;
  const auto add = [&](const fbs::ElementRange &range) {
    for (int64_t k = 0; k < range.count; ++k) {
      const fbs::ElementRange at = range.at(k);
      const bool added = elements.try_emplace(at.local, at.tensor ? *at.tensor : "padding", at.logical).second;
      EXPECT_TRUE(added) << at.local;
    }
  };
  if (places)
    PartsByPlace(layout).forEachRange(*places, add);
  else
    fbs::forEachRange(layout, add);
  return elements;
}

TEST(CopyRoom, BoundsWhatIsInUse) {
  CopyRoom room(100);
  std::atomic<int64_t> used = 0, most = 0, alone = 0;
  onThreads(4, [&](uint32_t thread) {
    for (uint32_t i = 0; i < 500; ++i) {
      const int64_t bytes = (7 * i + thread) % 50 == 0 ? 1000 : 10 + (i + thread) % 60; // some are larger than the room
      try {
        room.with(static_cast<uint64_t>(bytes), [&] {
          const int64_t now = used += std::min<int64_t>(bytes, 100);
          for (int64_t seen = most; now > seen && !most.compare_exchange_weak(seen, now);)
            ;
          alone += bytes > 100 && now == 100;
          used -= std::min<int64_t>(bytes, 100);
          if (i % 5 == 0)
            throw std::runtime_error("x");
        });
      } catch (const std::runtime_error &) { // its room is free again
      }
    }
  });
  EXPECT_LE(most, 100);
  EXPECT_EQ(alone, 40);
  room.with(100, [] {});
}

TEST(ElementRanges, OfSomePlaces) {
  const std::unique_ptr<Plan> plan = compiledPlan(
      "{version: 1, model: {dtype: fp32, index: {e: 3}, tensors: {w: [7, 24], v: [12, 5], 'x.{e}': [4, 6]}, "
      "layouts: {a: {params: same}, b: {params: {w: {concat: [{permute: [1, 0], of: w}], pad: {0: 5}}, "
      "both: {interleave: {groups: 4, of: [v, v]}}, x: {stack: e, holds: 'x.{e}', pad: {1: 8}}}}}}, "
      "source: {layout: a, mesh: {}}, target: {layout: b, mesh: {}}}");
  const fbs::Endpoint &endpoint = *plan->manifest().endpoints()->Get(1);
  std::mt19937_64 random(3);
  for (uint32_t p = 0; p < endpoint.params()->size(); ++p)
    for (const fbs::ParamInstance &instance : fbs::instances(plan->manifest(), endpoint, p, 0)) {
      const fbs::InstanceLayout layout{plan->manifest(), endpoint, 0, instance};
      const auto all = elementsOf(layout, nullptr);
      const int64_t elements = instance.bytes / 4;
      EXPECT_EQ(static_cast<int64_t>(all.size()), elements) << instance.name;
      for (int round = 0; round < 200; ++round) {
        Places places{static_cast<int64_t>(random() % static_cast<uint64_t>(elements)), 0};
        places.count = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(elements - places.first));
        std::map<int64_t, std::pair<std::string, int64_t>> wanted(all.lower_bound(places.first),
                                                                  all.lower_bound(places.first + places.count));
        EXPECT_EQ(elementsOf(layout, &places), wanted) << instance.name << " from " << places.first;
      }
    }
}

class Compare : public testing::Test {
protected:
  /// Source and target are `w` and `v` of [8, 320] and [320, 8], moved from `source` to `target`.
  void open(const std::string &source, const std::string &target, const std::string &mesh = "{tp: 2}") {
    openJob("{version: 1, model: {dtype: fp32, tensors: {w: [8, 320], v: [320, 8]}, layouts: {a: {params: {" + source +
            "}}, b: {params: {" + target + "}}}}, source: {layout: a, mesh: " + mesh +
            "}, target: {layout: b, mesh: " + mesh + "}}");
  }
  /// Opens a job and fills all sides: a tensor has the same synthesized values on each.
  void openJob(const std::string &yaml) {
    plan_ = compiledPlan(yaml);
    for (auto *memory : {&source_, &target_, &stored_}) {
      *memory = std::make_unique<Memory>(*plan_);
      const uint32_t endpoints = plan_->manifest().endpoints()->size();
      for (uint32_t e = memory != &source_; e < (memory == &target_ ? endpoints : memory == &source_ ? 1 : 2); ++e)
        ASSERT_EQ((*memory)->allocate(e).message(), "");
      for (const MeshRankMemory &rankMemory : (*memory)->rankMemories())
        synthesize(*plan_, rankMemory, 5, 1);
    }
  }

  /// Changes single bytes of all targets; each must be found.
  void changeBytes() {
    EXPECT_EQ(compare(*plan_, source_->rankMemories(), target_->rankMemories(), 2).first, "");
    for (const MeshRankMemory &rankMemory : target_->rankMemories())
      forEachBound(*plan_, rankMemory, [&](const fbs::ParamInstance &instance, std::byte *memory) {
        for (int64_t i = 0; i < instance.bytes; i += 331) {
          memory[i] ^= std::byte{0x21};
          const CheckResult wrong = compare(*plan_, source_->rankMemories(), target_->rankMemories(), 2);
          EXPECT_EQ(wrong.mismatches, 1u) << instance.name << " byte " << i;
          EXPECT_THAT(wrong.first,
                      testing::HasSubstr("param '" + instance.name + "': tensor '" + instance.name + "' element "));
          memory[i] ^= std::byte{0x21};
        }
      });
  }

  std::unique_ptr<Plan> plan_;
  std::unique_ptr<Memory> source_, target_, stored_; // stored_: of the first target only
};

constexpr char kRows[] = "w: {holds: w, shard: {0: tp}}, v: {holds: v, shard: {0: tp}}";
constexpr char kColumns[] = "w: {holds: w, shard: {1: tp}}, v: {holds: v, shard: {1: tp}}";
constexpr char kWhole[] = "w: {holds: w}, v: {holds: v}";
constexpr char kTransposed[] = "w: {concat: [{permute: [1, 0], of: w}]}, v: {concat: [{permute: [1, 0], of: v}]}";

TEST_F(Compare, FindsEveryWrongElement) {
  const char *const sides[] = {kRows, kColumns, kWhole, kTransposed};
  for (const char *source : sides)
    for (const char *target : sides) {
      SCOPED_TRACE(std::string(source) + " -> " + target);
      open(source, target);
      changeBytes();
    }
}

/// Ranges that are compared in several parts: rows longer than 1 MiB, and more than 1024 transposed rows.
TEST_F(Compare, FindsWrongElementsInEveryPart) {
  const std::string model = "{version: 1, model: {dtype: fp32, tensors: {w: [1300, 700], v: [600000]}, layouts: {a: "
                            "{params: {w: {holds: w}, v: {holds: v}}}, b: {params: {w: {concat: [{permute: [1, 0], of: "
                            "w}]}, v: {holds: v}}}}}, source: {layout: a, mesh: {}}, target: {layout: b, mesh: {}}}";
  openJob(model);
  const CheckResult right = compare(*plan_, source_->rankMemories(), target_->rankMemories(), 2);
  EXPECT_EQ(right.first, "");
  EXPECT_EQ(right.checkedBytes, 4u * (1300 * 700 + 600'000));
  const auto change = [&](uint32_t param, int64_t element) {
    std::byte &byte = target_->rankMemories()[0].params[param][0][4 * element + 1];
    byte ^= std::byte{4};
    EXPECT_EQ(compare(*plan_, source_->rankMemories(), target_->rankMemories(), 2).mismatches, 1u)
        << param << " element " << element;
    byte ^= std::byte{4};
  };
  // Element [row, column] of w is at column * 1300 + row: parts have 256 columns, and 1024 rows are compared at a time.
  for (const int64_t row : {0, 1023, 1024, 1299})
    for (const int64_t column : {0, 255, 256, 511, 512, 699})
      change(0, column * 1300 + row);
  for (const int64_t element : {0, 262'143, 262'144, 524'287, 524'288, 599'999}) // parts have 262,144 elements
    change(1, element);
}

/// Two processes share the tensors of a target in storage, also if other targets have other tensors.
TEST_F(Compare, ProcessesShareTensorsInStorage) {
  openJob(
      "{version: 1, model: {dtype: fp32, tensors: {a: [6], aa: [5], b: [7], c: [8], d: [9]}, layouts: {all: "
      "{params: same}, most: {params: {a: {holds: a}, b: {holds: b}, c: {holds: c}, d: {holds: d}}}, some: {params: "
      "{aa: {holds: aa}}}}}, source: {layout: all, mesh: {tp: 2}}, target: [{layout: most, storage: out}, {layout: "
      "some, mesh: {tp: 2}}]}");
  const auto &params = *plan_->manifest().endpoints()->Get(1)->params();
  std::map<std::string, uint64_t> found; // by how many processes a wrong element in storage is found
  for (uint32_t p = 0; p < params.size(); ++p)
    for (const size_t process : {0, 1}) {
      const Memory &target = process == 0 ? *stored_ : *target_; // the first process has no `aa`
      std::byte &byte = target.rankMemories()[0].params[p][0][0];
      byte ^= std::byte{1};
      found[params.Get(p)->name()->str()] +=
          compare(*plan_, source_->rankMemories(), target.rankMemories(), 1, {}, {process, 2}).mismatches;
      byte ^= std::byte{1};
    }
  EXPECT_EQ(found, (std::map<std::string, uint64_t>{{"a", 1}, {"b", 1}, {"c", 1}, {"d", 1}}));
}

TEST_F(Compare, FindsEveryWrongElementAfterACast) {
  for (const char *dtype : {"bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}) {
    SCOPED_TRACE(dtype);
    open(kColumns, std::string("w: {holds: w, convert: rne, dtype: ") + dtype +
                       "}, v: {holds: v, convert: rne, dtype: " + dtype + "}");
    changeBytes();
  }
}

TEST_F(Compare, ManyCodesAreCastAsOne) {
  std::mt19937_64 random(3);
  for (const char *from : {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"})
    for (const char *to : {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}) {
      if (std::string(from) == to)
        continue;
      SCOPED_TRACE(std::string(from) + " -> " + to);
      plan_ = compiledPlan(
          std::string("{version: 1, model: {tensors: {w: {shape: [8], dtype: ") + from +
          "}}, layouts: {a: {params: {w: {holds: w}}}, b: {params: {w: {holds: w, convert: rne, dtype: " + to +
          "}}}}}, source: {layout: a, mesh: {}}, target: {layout: b, mesh: {}}}");
      const SynthesizedValues values(PlanConversions(plan_->manifest()),
                                     *plan_->manifest().endpoints()->Get(1)->params()->Get(0));
      const auto sent = fbs::itemBytes(values.sentDtype), stored = fbs::itemBytes(values.storageDtype);
      constexpr int64_t kCodes = 1 << 16;
      std::vector<std::byte> codes(static_cast<size_t>(kCodes * sent)), results(static_cast<size_t>(kCodes * stored));
      for (int64_t k = 0; k < kCodes; ++k) { // all codes of 16 bits; with 32 bits, all values of bf16 and some between
        const uint64_t code =
            sent == 4 ? (static_cast<uint64_t>(k) << 16) + (random() & 0xFFFF) : static_cast<uint64_t>(k);
        std::memcpy(&codes[static_cast<size_t>(k * sent)], &code, static_cast<size_t>(sent));
      }
      values.cast(codes.data(), results.data(), kCodes);
      for (int64_t k = 0; k < kCodes; ++k) {
        uint64_t code = 0, result = 0;
        std::memcpy(&code, &codes[static_cast<size_t>(k * sent)], static_cast<size_t>(sent));
        std::memcpy(&result, &results[static_cast<size_t>(k * stored)], static_cast<size_t>(stored));
        ASSERT_EQ(result, values.cast(code)) << code;
      }
    }
}

TEST_F(Compare, ReplicasThatDifferAreNamed) {
  for (const char *source : {kWhole, kTransposed}) {
    SCOPED_TRACE(source);
    open(source, kRows);
    EXPECT_THAT(compareReplicas(*plan_, source_->rankMemories(), 2).differences, testing::IsEmpty());
    EXPECT_EQ(compareReplicas(*plan_, source_->rankMemories(), 2).comparedBytes, 2u * 8 * 320 * 4);
    source_->rankMemories()[1].params[1][0][4 * 777 + 2] ^= std::byte{1};
    const ReplicaResult result = compareReplicas(*plan_, source_->rankMemories(), 2);
    ASSERT_EQ(result.differences.size(), 1u);
    const bool transposed = source == kTransposed; // then place 777 is row 777 / 320, column 777 % 320 of v's transpose
    EXPECT_THAT(result.differences[0],
                testing::AllOf(testing::HasSubstr("rank 1 param 'v' differs from rank 0 param 'v'"),
                               testing::HasSubstr("the first different element is " +
                                                  std::to_string(transposed ? 777 % 320 * 8 + 777 / 320 : 777))));
  }
  open(kRows, kWhole); // no element is held twice
  EXPECT_EQ(compareReplicas(*plan_, source_->rankMemories(), 2).comparedBytes, 0u);
}

} // namespace
