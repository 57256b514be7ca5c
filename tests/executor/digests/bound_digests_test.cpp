// SPDX-License-Identifier: Apache-2.0
// Digests of bound memory: equal in every layout and on every number of processes, and of every replica; one wrong
// element is found, with its tensor, its rank and its index. Calls of the C API, with the text of every error.

#include "executor/digests/run_digests.h"
#include "executor/transports/transport.h"
#include "tests/executor/cpu_device.h"
#include "tests/lib/threads.h"
#include "tests/verify/support.h"
#include "tools/run/memory.h"
#include "verify/check/synthesize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <random>
#include <set>
#include <tuple>

namespace reshard {

namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using verify::MeshRankMemory;

/// The collectives of processes that are threads. Digests need no more of a transport.
class Processes {
public:
  explicit Processes(uint32_t count) : values_(count), barrier_(count) {}

  std::vector<std::vector<uint64_t>> gather(uint32_t process, std::vector<uint64_t> values) {
    values_[process] = std::move(values);
    barrier_.arrive_and_wait();
    std::vector<std::vector<uint64_t>> all = values_;
    barrier_.arrive_and_wait();
    return all;
  }

private:
  std::vector<std::vector<uint64_t>> values_;
  std::barrier<> barrier_;
};

class ProcessTransport : public Transport {
public:
  ProcessTransport(Processes &processes, uint32_t number) : processes_(processes), number_(number) {}

  Status prepare(const Plan &, const std::vector<LocalRank> &, Deadline) override { return {}; }
  Status run(Deadline) override { return {}; }
  uint64_t bytes() const override { return 0; }
  Result<int64_t> allReduceMin(int64_t value, Deadline) override {
    int64_t least = value;
    for (const auto &each : processes_.gather(number_, {static_cast<uint64_t>(value)}))
      least = std::min(least, static_cast<int64_t>(each.at(0)));
    return least;
  }
  Result<std::vector<uint64_t>> allReduceSum(std::vector<uint64_t> values, Deadline) override {
    std::vector<uint64_t> sums(values.size());
    for (const auto &each : processes_.gather(number_, values)) {
      EXPECT_EQ(each.size(), sums.size());
      for (size_t i = 0; i < sums.size(); ++i)
        sums[i] += each.at(i);
    }
    return sums;
  }

private:
  Processes &processes_;
  const uint32_t number_;
};

/// A plan with memory for all ranks, whose targets hold what they must after a run.
class DigestsTest : public testing::Test {
public:
  void open(const std::string &yaml, uint64_t seed = 1) {
    plan_ = tests::compiledPlan(yaml);
    memory_ = std::make_unique<tools::Memory>(*plan_);
    for (uint32_t endpoint = 0; endpoint < plan_->manifest().endpoints()->size(); ++endpoint)
      ASSERT_EQ(memory_->allocate(endpoint).message(), "");
    fill(seed);
  }
  void fill(uint64_t seed) {
    for (const MeshRankMemory &each : memory_->rankMemories())
      verify::synthesize(*plan_, each, seed, 1);
  }
  const schema::Endpoint &endpoint(uint32_t number) const { return *plan_->manifest().endpoints()->Get(number); }
  const MeshRankMemory &memoryOf(uint32_t endpoint, uint32_t meshRank) const {
    return *std::find_if(memory_->rankMemories().begin(), memory_->rankMemories().end(),
                         [&](const auto &each) { return each.endpoint == endpoint && each.meshRank == meshRank; });
  }
  static bool everyRank(uint32_t) { return true; }
  DigestMemory digestMemory(Transport &transport, unsigned threads, std::function<bool(uint32_t rank)> local) const {
    return {*plan_, transport, threads,
            [this, local = std::move(local)](uint32_t number, uint32_t meshRank) {
              return local(endpoint(number).ranks()->Get(meshRank));
            },
            [this](uint32_t number, uint32_t meshRank, uint32_t param, uint32_t instance) -> const std::byte * {
              return memoryOf(number, meshRank).params[param][instance];
            }};
  }
  /// Calls work(digests) in so many processes, among which the ranks are dealt. Returns the results, by process.
  template <class Result> std::vector<Result> inProcesses(uint32_t count, std::function<Result(RunDigests &)> work) {
    Processes processes(count);
    std::vector<Result> results(count);
    tests::onThreads(count, [&](uint32_t p) {
      ProcessTransport transport(processes, p);
      RunDigests digests(digestMemory(transport, 1 + p % 2, [=](uint32_t rank) { return rank % count == p; }));
      results[p] = work(digests);
    });
    return results;
  }
  using Texts = std::map<std::string, std::string>;
  /// The digests of an endpoint as text, by name.
  static Texts textsOf(RunDigests &digests, uint32_t endpoint) {
    Texts texts;
    const Result<std::vector<SideDigest>> found = digests.side(endpoint, false, {});
    EXPECT_EQ(found.status().message(), "");
    for (const SideDigest &each : *found) {
      texts[each.tensor] = each.sum.digest.text();
      EXPECT_TRUE(each.whole()) << each.tensor;
    }
    return texts;
  }
  /// The same in every process.
  Texts side(uint32_t endpoint, uint32_t processes = 1) {
    const std::vector<Texts> all =
        inProcesses<Texts>(processes, [&](RunDigests &digests) { return textsOf(digests, endpoint); });
    for (const Texts &texts : all)
      EXPECT_EQ(texts, all[0]);
    return all[0];
  }
  /// The error of a check, which is the same in every process.
  std::string check(uint32_t processes, const CheckOptions &options = {.firstIndex = true}) {
    const std::vector<std::string> errors = inProcesses<std::string>(processes, [&](RunDigests &digests) {
      const Status before = digests.expect(options, {});
      return before.ok() ? digests.compare({}).message() : before.message();
    });
    for (const std::string &error : errors)
      EXPECT_EQ(error, errors[0]);
    return errors[0];
  }

  std::unique_ptr<Plan> plan_;
  std::unique_ptr<tools::Memory> memory_;
};

/// Packs, stacks, permutations, uneven and cyclic shards, padding, replicas of parts, tensors in two params.
const std::string kModel = R"(version: 1
model:
  dtype: bf16
  index: {layer: 2, expert: 4}
  tensors: {"l.{layer}.q": [8, 6], "l.{layer}.k": [4, 6], "l.{layer}.e.{expert}.up": [6, 5], norm: {shape: [7], dtype: fp32}, scale: [], mask: {shape: [3, 3], dtype: u8}, wide: {shape: [5, 3000]}}
  layouts:
    hf: {params: same}
    train:
      axes: [tp, ep, dp]
      place: {expert: ep}
      params:
        "qk.{layer}": {interleave: {groups: 2, of: [q, k]}, shard: {0: tp}}
        "up.{layer}.{expert.local}": {holds: up, permute: [1, 0], shard: {1: tp}}
        norm: {holds: norm, pad: {0: 8}, shard: {0: tp}}
        scale: {holds: scale}
        mask: {holds: mask}
        wide: {holds: wide, shard: {1: tp}}
    serve:
      axes: [tp, dp]
      params:
        "q.{layer}": {holds: q, shard: {1: {axis: tp, cyclic: 1}}}
        "k.{layer}": {holds: k, shard: {0: {axis: tp, unit: 2, replicate: true}}}
        "up.{layer}": {stack: expert, holds: up, shard: {1: {axis: tp, scheme: balanced}}}
        norm: {holds: norm}
        scale: {holds: scale}
        mask: {holds: mask}
        wide: {holds: wide, shard: {0: {axis: tp, scheme: balanced}}}
)";
const std::string kTrain = "{layout: train, mesh: {tp: 2, ep: 2, dp: 2}",
                  kServe = "{layout: serve, mesh: {tp: 4, dp: 2}", kWhole = "{layout: hf, mesh: {}";
std::string jobOf(const std::string &source, const std::string &target) {
  return kModel + "source: " + source + "}\ntarget: " + target + ", ranks: 10.." + (target == kWhole ? "10" : "17") +
         "}\n";
}

} // namespace

TEST_F(DigestsTest, TheIndexOfHoldingsHasTheElementsOfEveryMeshRank) {
  using Elements = std::set<std::tuple<uint32_t, int64_t, std::string, int64_t>>; // instance, place, tensor, index
  const auto add = [](Elements &to, uint32_t instance, const schema::ElementRange &range) {
    for (int64_t k = 0; k < range.count; ++k)
      to.emplace(instance, range.at(k).local, range.tensor ? *range.tensor : "",
                 range.tensor ? range.at(k).logical : 0);
  };
  for (const std::string &source : {kTrain, kServe}) {
    ASSERT_NO_FATAL_FAILURE(open(jobOf(source, kWhole)));
    const schema::Manifest &manifest = plan_->manifest();
    const schema::Holdings held = holdingsOf(manifest, 0, [](uint32_t, uint32_t) { return true; }, true);
    std::vector<Elements> ofClass(held.classes.size());
    for (const schema::Holding &holding : held.items)
      forEachRangeOf(holding.grid, [&](const schema::ElementRange &range) {
        EXPECT_EQ(range.tensor ? *range.tensor : "", *held.tensors[holding.tensor].name);
        add(ofClass[holding.rankClass], holding.instance, range);
      });
    for (uint32_t param = 0; param < endpoint(0).params()->size(); ++param) {
      std::map<uint32_t, size_t> classOf; // by mesh rank
      for (size_t c = 0; c < held.classes.size(); ++c)
        for (const uint32_t meshRank : held.classes[c].meshRanks)
          if (held.classes[c].param == param) {
            EXPECT_TRUE(classOf.emplace(meshRank, c).second);
          }
      for (uint32_t meshRank = 0; meshRank < endpoint(0).ranks()->size(); ++meshRank) {
        Elements wanted;
        for (const schema::ParamInstance &instance : schema::instances(manifest, endpoint(0), param, meshRank))
          schema::forEachRange({manifest, endpoint(0), meshRank, instance},
                               [&](const schema::ElementRange &range) { add(wanted, instance.instance, range); });
        EXPECT_TRUE(ofClass[classOf.at(meshRank)] == wanted) << param << " " << meshRank;
      }
    }
    // Without those that an earlier holding has, each element is held once.
    std::map<std::string, int64_t> elements;
    for (const schema::Holding &holding : held.items) {
      std::set<int64_t> earlier;
      for (const schema::PartGrid &grid : held.heldEarlier(holding))
        forEachRangeOf(grid, [&](const schema::ElementRange &range) {
          for (int64_t k = 0; k < range.count; ++k)
            earlier.insert(range.at(k).local);
        });
      elements[*held.tensors[holding.tensor].name] += holding.grid.elements() - static_cast<int64_t>(earlier.size());
    }
    for (const schema::HeldTensor &tensor : held.tensors)
      if (!tensor.name->empty()) {
        EXPECT_EQ(elements.at(*tensor.name), tensor.elements) << *tensor.name;
      }
    EXPECT_EQ(held.tensors.size(), source == kTrain ? 17u : 16u); // norm is padded
    EXPECT_EQ(held.classes.size(), source == kTrain ? 12u : 19u); // of 6 and 7 params on 8 mesh ranks
  }
}

TEST_F(DigestsTest, AreEqualInEveryLayoutAndOnEveryNumberOfProcesses) {
  ASSERT_NO_FATAL_FAILURE(open(jobOf(kTrain, kWhole)));
  // Of whole tensors in memory, by the definition alone.
  Texts wanted;
  tests::forEachBound(*plan_, memoryOf(1, 0), [&](const schema::ParamInstance &instance, const std::byte *at) {
    kernels::TensorDigest digest;
    digest.add(at, 1, 1, 0, static_cast<uint64_t>(instance.bytes));
    wanted[instance.name] = digest.text();
  });
  EXPECT_EQ(wanted.size(), 16u);
  for (const auto &[source, target] : {std::pair(kTrain, kWhole), {kTrain, kServe}, {kServe, kTrain}}) {
    ASSERT_NO_FATAL_FAILURE(open(jobOf(source, target)));
    for (const uint32_t processes : {1u, 3u, 18u})
      for (const uint32_t number : {0u, 1u})
        EXPECT_EQ(side(number, processes), wanted) << target << " " << number << " " << processes;
    EXPECT_EQ(check(1), "");
    EXPECT_EQ(check(5), "");
  }
}

TEST_F(DigestsTest, OneWrongElementOfOneRankIsFound) {
  std::mt19937_64 random(7);
  for (const auto &[source, target] : {std::pair(kTrain, kServe), {kServe, kTrain}}) {
    ASSERT_NO_FATAL_FAILURE(open(jobOf(source, target)));
    size_t found = 0;
    for (size_t trial = 0; trial < 60; ++trial) {
      const auto meshRank = static_cast<uint32_t>(random() % endpoint(1).ranks()->size());
      const MeshRankMemory &memory = memoryOf(1, meshRank);
      const auto param = static_cast<uint32_t>(random() % memory.params.size());
      if (memory.params[param].empty())
        continue;
      const auto instances = schema::instances(plan_->manifest(), endpoint(1), param, meshRank);
      const schema::ParamInstance &instance = instances[random() % instances.size()];
      const int64_t item = schema::itemBytes(schema::storageDtypeOf(*endpoint(1).params()->Get(param)));
      const auto place = static_cast<int64_t>(random() % static_cast<uint64_t>(instance.bytes / item));
      std::string tensor;
      int64_t index = 0, width = 1;
      size_t dimensions = 0;
      schema::forEachRange(
          {plan_->manifest(), endpoint(1), meshRank, instance}, [&](const schema::ElementRange &range) {
            for (int64_t k = 0; range.tensor && k < range.count; ++k)
              if (range.local + k * range.localStep == place) {
                tensor = *range.tensor;
                index = range.logical + k;
                const auto &shape =
                    *plan_->manifest().tensor_patterns()->Get(static_cast<uint32_t>(range.pattern))->shape();
                dimensions = shape.size();
                width = dimensions == 2 ? static_cast<int64_t>(shape.Get(1)) : 1;
              }
          });
      std::byte &wrong = memory.params[param][instance.instance]
                                      [place * item + static_cast<int64_t>(random() % static_cast<uint64_t>(item))];
      const auto bit = static_cast<std::byte>(1u << random() % 8);
      wrong ^= bit;
      const std::string error = check(trial % 4 ? 1 : 4);
      wrong ^= bit;
      if (tensor.empty()) { // padding
        EXPECT_EQ(error, "");
        continue;
      }
      ++found;
      const std::string rank = "rank " + std::to_string(endpoint(1).ranks()->Get(meshRank));
      const std::string at = dimensions == 0 ? "[]"
                             : dimensions == 1
                                 ? "[" + std::to_string(index) + "]"
                                 : "[" + std::to_string(index / width) + ", " + std::to_string(index % width) + "]";
      EXPECT_EQ(error, "the targets differ from the source after the run: tensor '" + tensor + "' is wrong on target " +
                           rank + ", first at index " + at + " on " + rank);
    }
    EXPECT_GT(found, 40u);
    EXPECT_EQ(check(2), "");
  }
}

TEST_F(DigestsTest, NamesSomeTensorsAndRanks) {
  ASSERT_NO_FATAL_FAILURE(open(jobOf(kTrain, kServe)));
  for (const MeshRankMemory &memory : memory_->rankMemories())
    if (memory.endpoint == 1 && memory.meshRank != 2 && memory.meshRank != 5)
      tests::forEachBound(*plan_, memory, [](const schema::ParamInstance &instance, std::byte *at) {
        if (instance.name == "norm")
          at[0] ^= std::byte{1};
      });
  EXPECT_EQ(check(3, {}), "the targets differ from the source after the run: tensor 'norm' is wrong on target rank 10, "
                          "rank 11, rank 13, rank 14, rank 16, rank 17");
  tests::forEachBound(*plan_, memoryOf(1, 3), [](const schema::ParamInstance &instance, std::byte *at) {
    for (int64_t byte = 0; byte < instance.bytes; ++byte)
      at[byte] ^= std::byte{1};
  });
  EXPECT_THAT(check(3, {}), HasSubstr("; and 8 more tensors are wrong"));
}

TEST_F(DigestsTest, TargetsThatAreCastHoldTheElementsOfTheCast) {
  ASSERT_NO_FATAL_FAILURE(
      open("version: 1\nmodel: {dtype: bf16, tensors: {a: {shape: [40, 70], shard: {0: tp}}}}\n"
           "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 5}, dtype: fp32, convert: rne, ranks: 2..6}\n"));
  EXPECT_EQ(check(1), "");
  EXPECT_NE(side(0), side(1));
  memoryOf(1, 3).params[0][0][4 * 71] ^= std::byte{1};
  EXPECT_EQ(check(7),
            "the targets differ from the source after the run: tensor 'a' is wrong on target rank 5, first at "
            "index [25, 1] on rank 5");
}

TEST_F(DigestsTest, QuantizedParamsAreLeftOutByName) {
  ASSERT_NO_FATAL_FAILURE(
      open("version: 1\nmodel: {dtype: bf16, tensors: {a: {shape: [64, 64], shard: {0: tp}}, b: {shape: [6]}}}\n"
           "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 2}, ranks: 2..3, quantize: {format: mxfp8, only: a}}\n"));
  EXPECT_THAT(check(2), testing::Eq("expected params that hold elements of tensors on both sides, found quantized or "
                                    "transformed ones: target param 'a', target param 'a_scale'"));
  Processes processes(1);
  ProcessTransport transport(processes, 0);
  RunDigests digests(digestMemory(transport, 2, everyRank));
  EXPECT_EQ(digests.side(1, false, {}).status().kind(), ErrorKind::invalid);
  ASSERT_TRUE(digests.side(1, true, {}).ok());
  EXPECT_THAT(digests.undigested(), ElementsAre("target param 'a'", "target param 'a_scale'"));
  EXPECT_EQ(check(2, {.firstIndex = false, .changed = false, .allowUndigested = true}), "");
}

TEST_F(DigestsTest, ASourceThatHasNotChangedIsAnError) {
  ASSERT_NO_FATAL_FAILURE(open(jobOf(kTrain, kServe)));
  Processes processes(1);
  ProcessTransport transport(processes, 0);
  RunDigests digests(digestMemory(transport, 2, everyRank));
  const CheckOptions changed{.firstIndex = false, .changed = true, .allowUndigested = false};
  for (uint64_t seed = 1; seed < 3; ++seed) {
    fill(seed);
    ASSERT_EQ(digests.expect(changed, {}).message(), "");
    ASSERT_EQ(digests.compare({}).message(), "");
  }
  const Status again = digests.expect(changed, {});
  EXPECT_EQ(again.kind(), ErrorKind::invalid);
  EXPECT_THAT(again.message(), HasSubstr("the source has not changed since the last run that was checked"));
  EXPECT_EQ(digests.expect({}, {}).message(), "");
}

TEST_F(DigestsTest, OfADeviceAreThoseOfItsMemory) {
  ASSERT_NO_FATAL_FAILURE(open(jobOf(kTrain, kServe)));
  auto cpu = std::make_unique<tests::CpuDevice>(1);
  const uint64_t &launches = cpu->digests;
  const std::unique_ptr<Transport> device = makeRecordedTransport(std::move(cpu), nullptr, {});
  RunDigests digests(digestMemory(*device, 1, everyRank));
  for (const uint32_t number : {0u, 1u})
    EXPECT_EQ(textsOf(digests, number), side(number));
  EXPECT_GT(launches, 0u);
  ASSERT_EQ(digests.expect({.firstIndex = true}, {}).message(), "");
  const uint64_t before = launches;
  EXPECT_EQ(digests.compare({}).message(), "");
  EXPECT_GT(launches, before);
}

TEST_F(DigestsTest, AFailureOfOneProcessFailsAll) {
  ASSERT_NO_FATAL_FAILURE(open(jobOf(kTrain, kServe)));
  Processes processes(3);
  std::vector<std::string> errors(3);
  tests::onThreads(3, [&](uint32_t p) {
    ProcessTransport transport(processes, p);
    DigestMemory memory = digestMemory(transport, 1, [=](uint32_t rank) { return rank % 3 == p; });
    if (p == 1)
      memory.bound = [](uint32_t, uint32_t, uint32_t, uint32_t) { return nullptr; };
    errors[p] = RunDigests(std::move(memory)).side(0, false, {}).status().message();
  });
  EXPECT_EQ(errors[1], "source rank 1 param 'qk.0' is not bound: a digest needs all params");
  EXPECT_EQ(errors[0], "the digests of another rank failed; see its error");
  EXPECT_EQ(errors[2], errors[0]);
}

} // namespace reshard
