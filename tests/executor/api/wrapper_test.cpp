// SPDX-License-Identifier: Apache-2.0
// reshard_plan.h and reshard.hpp: the contents of a plan, exceptions for errors, hooks that throw.

#include "reshard/reshard.hpp"

#include "tests/executor/thrown.h"
#include "tests/lib/threads.h"
#include "tests/verify/support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>
#include <unistd.h>

namespace {

using reshard::tests::thrown;
using reshard::tests::Thrown;
using testing::ElementsAre;
using testing::HasSubstr;

class WrapperTest : public testing::Test {
public:
  void SetUp() override {
    compile("version: 1\n"
            "model:\n"
            "  name: small\n"
            "  dtype: fp32\n"
            "  index: {layer: 2}\n"
            "  tensors: {\"l.{layer}.w\": [4, 6], scale: []}\n"
            "  layouts:\n"
            "    train: {params: same, shard: {\"*.w\": {0: tp}}}\n"
            "    serve: {params: {\"w{layer}\": {holds: w, refresh: fold}, scale: {holds: scale}}}\n"
            "source: {layout: train, mesh: {tp: 2}}\n"
            "target: {layout: serve, mesh: {}, ranks: [2]}\n");
  }

  void compile(const std::string &text) { reshard::tests::compile(text, path_); }

  const reshard::tests::TemporaryFolder folder_;
  const std::string path_ = folder_ / "plan.rplan";
};

TEST_F(WrapperTest, PlanContents) {
  const reshard::PlanFile plan(path_);
  const reshard_summary summary = plan.summary();
  EXPECT_EQ(summary.world, 3u);
  EXPECT_EQ(summary.endpoints, 2u);
  EXPECT_STREQ(summary.model, "small");
  EXPECT_EQ(std::string(summary.digest).size(), 32u);
  EXPECT_EQ(summary.plan_bytes, std::filesystem::file_size(path_));
  EXPECT_EQ(summary.target_bytes, (2 * 4 * 6 + 1) * 4u);
  EXPECT_EQ(summary.local_bytes + summary.remote_bytes, summary.target_bytes);
  const reshard_endpoint source = plan.endpoint(0), target = plan.endpoint(1);
  EXPECT_STREQ(source.role, "source");
  EXPECT_STREQ(target.layout, "serve");
  EXPECT_THAT(std::vector(source.ranks, source.ranks + source.rank_count), ElementsAre(0u, 1u));
  EXPECT_THAT(std::vector(target.ranks, target.ranks + target.rank_count), ElementsAre(2u));
  const auto held = plan.params(0, 1), served = plan.params(1, 2);
  ASSERT_EQ(held.size(), 3u);
  EXPECT_STREQ(held[1].name, "l.1.w");
  EXPECT_STREQ(held[1].dtype, "fp32");
  EXPECT_STREQ(held[1].refresh, "");
  EXPECT_THAT(std::vector(held[1].shape, held[1].shape + held[1].dimensions), ElementsAre(2, 6));
  EXPECT_EQ(held[1].bytes, 48u);
  EXPECT_EQ(held[2].dimensions, 0u);
  EXPECT_EQ(held[2].bytes, 4u);
  EXPECT_STREQ(served[0].name, "w0");
  EXPECT_STREQ(served[0].refresh, "fold");
  EXPECT_EQ(plan.params(0, 1).data(), held.data()); // the list is built once
}

TEST_F(WrapperTest, RanksOfAllReplicas) {
  compile("version: 1\n"
          "model: {dtype: fp32, tensors: {w: {shape: [3, 6], shard: {0: {axis: tp, scheme: chunk}}}}}\n"
          "source: {mesh: {tp: 1}}\n"
          "target: {mesh: {tp: 2}, replicas: 3}\n");
  const reshard::PlanFile plan(path_);
  const reshard_endpoint target = plan.endpoint(1);
  EXPECT_THAT(std::vector(target.ranks, target.ranks + target.rank_count), ElementsAre(1u, 2u)); // of replica 0
  for (const uint32_t first : {1u, 3u, 1u + 2 * 65535u}) {
    EXPECT_EQ(plan.params(1, first)[0].shape[0], 2);
    EXPECT_EQ(plan.params(1, first + 1)[0].shape[0], 1);
  }
  EXPECT_EQ(thrown([&] { plan.params(1, 1 + 2 * 65536); }).second, "target has no rank 131073");
  EXPECT_EQ(thrown([&] { plan.params(1, 0); }).second, "target has no rank 0");
  EXPECT_EQ(thrown([&] { plan.params(0, 3); }).second, "source has no rank 3");
}

TEST_F(WrapperTest, ManyThreadsReadAPlan) {
  const reshard::PlanFile plan(path_);
  reshard::tests::onThreads(4, [&plan](uint32_t) {
    for (uint32_t rank = 0; rank < 2; ++rank)
      EXPECT_STREQ(plan.params(0, rank)[0].name, "l.0.w");
  });
}

TEST_F(WrapperTest, EndpointsAndRanksThatDoNotExist) {
  const reshard::PlanFile plan(path_);
  EXPECT_EQ(thrown([&] { plan.endpoint(2); }), Thrown(RESHARD_INVALID, "there is no endpoint 2, the plan has 2"));
  EXPECT_EQ(thrown([&] { plan.params(1, 0); }), Thrown(RESHARD_INVALID, "target has no rank 0"));
  const auto [status, text] = thrown([&] { reshard::PlanFile(folder_ / "absent"); });
  EXPECT_EQ(status, RESHARD_BAD_PLAN);
  EXPECT_THAT(text, HasSubstr("/absent'"));
}

TEST_F(WrapperTest, NullAndUnopenedPlans) {
  reshard_plan *plan = nullptr;
  reshard_summary summary = RESHARD_SUMMARY_INITIALIZER;
  reshard_endpoint endpoint = RESHARD_ENDPOINT_INITIALIZER;
  const reshard_param *params = nullptr;
  size_t count = 0;
  EXPECT_EQ(reshard_plan_open(path_.c_str(), nullptr), RESHARD_INVALID);
  EXPECT_EQ(reshard_plan_open(nullptr, &plan), RESHARD_INVALID);
  for (const reshard_plan *each :
       {static_cast<const reshard_plan *>(plan), static_cast<const reshard_plan *>(nullptr)}) {
    EXPECT_STRNE(reshard_plan_error(each), "");
    EXPECT_EQ(reshard_plan_summary(each, &summary), RESHARD_INVALID);
    EXPECT_EQ(reshard_plan_endpoint(each, 0, &endpoint), RESHARD_INVALID);
    EXPECT_EQ(reshard_plan_params(each, 0, 0, sizeof(reshard_param), &params, &count), RESHARD_INVALID);
  }
  reshard_plan_close(plan);
  reshard_plan_close(nullptr);
}

TEST_F(WrapperTest, RunsAndHooks) {
  const reshard::PlanFile plan(path_);
  reshard::Executor executor(path_);
  std::vector<std::vector<float>> memory;
  for (uint32_t endpoint = 0; endpoint < 2; ++endpoint)
    for (uint32_t rank : executor.ranks())
      if ((rank == 2) == (endpoint == 1))
        for (const reshard_param &param : plan.params(endpoint, rank)) {
          memory.emplace_back(param.bytes / sizeof(float), endpoint == 0 ? 7 : 0);
          executor.bind(endpoint, rank, param.name, memory.back().data(), param.bytes);
        }
  EXPECT_EQ(thrown([&] { executor.run(); }), Thrown(RESHARD_INVALID, "run before prepare"));
  EXPECT_EQ(thrown([&] { executor.prepare(); }).first, RESHARD_BAD_BINDING); // the hook is not set
  int calls = 0;
  executor.setHook("fold", [&](uint32_t rank) {
    EXPECT_EQ(rank, 2u);
    EXPECT_EQ(memory.back()[0], 7);
    if (++calls == 2)
      throw std::runtime_error("no room");
  });
  executor.prepare();
  executor.run(60);
  EXPECT_EQ(executor.version(), 1u);
  EXPECT_EQ(executor.state(), RESHARD_COMPLETE);
  EXPECT_EQ(executor.allReduceMin(5), 5);
  EXPECT_EQ(thrown([&] { executor.run(); }), Thrown(RESHARD_FAILED, "the hook 'fold' failed on rank 2"));
  EXPECT_EQ(executor.state(), RESHARD_TORN);
  executor.run();
  EXPECT_EQ(executor.version(), 2u);
  EXPECT_EQ(thrown([&] { executor.enqueue(nullptr); }),
            Thrown(RESHARD_INVALID, "enqueue needs device 'cuda': device 'cpu' has no streams"));
}

TEST_F(WrapperTest, PullModeIsAnOption) {
  reshard::Executor executor(path_);
  const std::pair<const char *, std::function<void()>> calls[] = {
      {"publish", [&] { executor.publish(1); }},
      {"release", [&] { executor.release(1); }},
      {"pull", [&] { executor.pull(1, 1); }},
      {"replicas", [&] { executor.replicas(); }},
  };
  for (const auto &[name, call] : calls) {
    const auto [status, text] = thrown(call);
    EXPECT_EQ(status, RESHARD_INVALID);
    EXPECT_THAT(text, testing::MatchesRegex(std::string(name) + " needs .*pull.*"));
  }
}

/// Two source ranks and a rank of a replica, which are executors of this thread: no call but pull waits for another.
class WrapperPullTest : public WrapperTest {
public:
  void SetUp() override {
    if (!std::filesystem::exists(std::filesystem::read_symlink("/proc/self/exe").parent_path() / "libreshard_ucx.so"))
      GTEST_SKIP() << "libreshard_ucx.so was not built: UCX is missing, or this is a build with ThreadSanitizer";
    compile("version: 1\n"
            "model: {dtype: fp32, tensors: {w: {shape: [2, 6], shard: {0: tp}}}}\n"
            "source: {mesh: {tp: 2}}\n"
            "target: {mesh: {tp: 1}, ranks: [2], replicas: 2}\n");
    options.transport = "ucx";
    options.rendezvous = rendezvous.c_str();
    options.join_seconds = 30;
    options.pull = 1;
  }
  void openSources() {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      sources.emplace_back(path_, options, std::vector{rank}).bind(0, rank, "w", held[rank].data(), 24);
      sources.back().prepare();
    }
  }
  void publish(uint64_t version, bool checked = false) {
    fill(static_cast<float>(version));
    for (reshard::Executor &source : sources)
      source.publish(version, checked);
  }
  void release() {
    for (reshard::Executor &source : sources)
      source.release(30);
  }
  reshard::Executor openTarget() {
    reshard::Executor target(path_, options, {kWorldRank});
    target.bind(1, kWorldRank, "w", served.data(), 48);
    target.prepare();
    return target;
  }
  /// Sets the bound memory of the sources to values of a version.
  void fill(float version) {
    for (size_t i = 0; i < 6; ++i) {
      held[0][i] = 10 * version;
      held[1][i] = 10 * version + 1;
    }
  }
  auto areOf(float version) const {
    std::vector<float> values(12, 10 * version);
    std::fill(values.begin() + 6, values.end(), 10 * version + 1);
    return testing::ElementsAreArray(values);
  }

  static constexpr uint32_t kReplica = 1, kWorldRank = 3;
  const std::string rendezvous = "file://" + folder_.path();
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  std::vector<float> held[2] = {std::vector<float>(6), std::vector<float>(6)}, served = std::vector<float>(12);
  std::deque<reshard::Executor> sources;
};

TEST_F(WrapperPullTest, AReplicaPullsInCpp) {
  openSources();
  reshard::Executor target = openTarget();
  EXPECT_EQ(thrown([&] { target.pull(0, 0.2); }).first, RESHARD_TIMEOUT);
  for (const uint64_t version : {3, 7}) {
    publish(version);
    EXPECT_EQ(target.pull(version, 30), version);
    EXPECT_EQ(target.version(), version);
    EXPECT_EQ(target.state(), RESHARD_COMPLETE);
    EXPECT_THAT(served, areOf(static_cast<float>(version)));
    release();
  }
  const std::vector<reshard_replica> found = sources[0].replicas();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].replica, kReplica);
  EXPECT_EQ(found[0].version, 7u);
  EXPECT_EQ(found[0].state, RESHARD_REPLICA_COMPLETE);
}

TEST_F(WrapperPullTest, AReplicaChecksWhatItPulls) {
  openSources();
  reshard::Executor target = openTarget();
  reshard_check check = RESHARD_CHECK_INITIALIZER;
  publish(3, true);
  EXPECT_EQ(target.pull(3, 30, &check), 3u);
  EXPECT_EQ(target.pulls(), 1u);
  EXPECT_EQ(target.pull(3, 30, &check), 3u); // holds it already
  EXPECT_EQ(target.pulls(), 1u);
  EXPECT_EQ(target.state(), RESHARD_COMPLETE);
  release();

  publish(7, true);
  held[0][2] = 99; // after its digest was computed
  const Thrown mismatch = {
      RESHARD_FAILED,
      "the memory of replica 1 rank 0 (world rank 3) differs from version 7 of the source: wrong are the tensors 'w'"};
  EXPECT_EQ(thrown([&] { target.pull(7, 30, &check); }), mismatch);
  EXPECT_EQ(target.state(), RESHARD_TORN);
  EXPECT_EQ(target.version(), 3u);
  held[0][2] = 70;
  EXPECT_EQ(target.pull(7, 30, &check), 7u);
  EXPECT_THAT(served, areOf(7));
  EXPECT_EQ(target.pulls(), 2u);
  EXPECT_EQ(target.state(), RESHARD_COMPLETE);
  served[11] = 0;
  EXPECT_EQ(thrown([&] { target.pull(7, 30, &check); }), mismatch);
  EXPECT_EQ(target.state(), RESHARD_TORN);
  EXPECT_EQ(target.pull(7, 30), 7u);
  EXPECT_THAT(served, areOf(7));
  EXPECT_EQ(target.pulls(), 3u);
  release();

  for (int reshard_check::*field : {&reshard_check::first_index, &reshard_check::changed}) {
    reshard_check runOnly = RESHARD_CHECK_INITIALIZER;
    runOnly.*field = 1;
    EXPECT_EQ(thrown([&] { target.pull(7, 30, &runOnly); }),
              Thrown(RESHARD_INVALID, "found first_index or changed in the check of a pull, which only a run has"));
  }

  publish(8);
  EXPECT_THAT(thrown([&] { target.pull(8, 30, &check); }).second,
              testing::HasSubstr("version 8 cannot be checked: source rank "));
  EXPECT_EQ(target.pull(8, 30), 8u);
  release();

  EXPECT_EQ(thrown([&] { target.digest(1); }).first, RESHARD_INVALID);
  EXPECT_EQ(thrown([&] { target.publish(9, true); }),
            Thrown(RESHARD_INVALID, "publish on replica 1 rank 0 (world rank 3), expected a rank of the source"));
  EXPECT_EQ(thrown([&] { sources[0].pull(0, 0, &check); }),
            Thrown(RESHARD_INVALID, "pull on source rank 0 (world rank 0), expected a rank of a replica"));
}

TEST_F(WrapperPullTest, ACheckedPullNamesParamsWithoutADigest) {
  compile("version: 1\n"
          "model: {dtype: bf16, tensors: {w: {shape: [2, 64]}, b: [6]}}\n"
          "source: {mesh: {}}\n"
          "target: {mesh: {}, ranks: [2], replicas: 2, quantize: mxfp8}\n");
  const reshard::PlanFile plan(path_);
  std::deque<std::vector<std::byte>> memory;
  const auto bound = [&](uint32_t endpoint, uint32_t rank, uint32_t planRank) {
    reshard::Executor executor(path_, options, {rank});
    for (const reshard_param &param : plan.params(endpoint, planRank))
      executor.bind(endpoint, rank, param.name, memory.emplace_back(param.bytes).data(), param.bytes);
    executor.prepare();
    return executor;
  };
  reshard::Executor source = bound(0, 0, 0), target = bound(1, kWorldRank, 2);
  source.publish(1, true);
  reshard_check check = RESHARD_CHECK_INITIALIZER;
  const auto refused = thrown([&] { target.pull(1, 30, &check); });
  EXPECT_EQ(refused.first, RESHARD_INVALID);
  EXPECT_THAT(refused.second, testing::HasSubstr("found quantized or transformed ones: target param 'w"));
  EXPECT_EQ(target.state(), RESHARD_EMPTY);
  check.allow_undigested = 1;
  EXPECT_EQ(target.pull(1, 30, &check), 1u);
  EXPECT_THAT(target.undigested(), testing::Contains(testing::HasSubstr("target param 'w")));
  EXPECT_EQ(target.state(), RESHARD_COMPLETE);
}

TEST_F(WrapperPullTest, AReplicaPullsInC) {
  reshard_executor *executors[3] = {};
  const uint32_t ranks[3] = {0, 1, kWorldRank};
  for (int i = 0; i < 3; ++i) {
    std::vector<float> &memory = i < 2 ? held[i] : served;
    ASSERT_EQ(reshard_open(path_.c_str(), &ranks[i], 1, &options, &executors[i]), RESHARD_OK);
    ASSERT_EQ(reshard_bind(executors[i], i == 2, ranks[i], "w", memory.data(), 4 * memory.size()), RESHARD_OK);
    ASSERT_EQ(reshard_prepare(executors[i]), RESHARD_OK) << reshard_error(executors[i]);
  }
  fill(5);
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(reshard_publish(executors[i], 5, 0), RESHARD_OK) << reshard_error(executors[i]);
  EXPECT_EQ(reshard_publish(executors[0], 6, 0), RESHARD_INVALID);
  uint64_t version = 0;
  EXPECT_EQ(reshard_pull(executors[2], 0, 30, nullptr, &version), RESHARD_OK) << reshard_error(executors[2]);
  EXPECT_EQ(version, 5u);
  EXPECT_EQ(reshard_version(executors[2]), 5u);
  EXPECT_EQ(reshard_target_state(executors[2]), RESHARD_COMPLETE);
  EXPECT_THAT(served, areOf(5));
  reshard_replica found[2] = {};
  size_t count = 0;
  EXPECT_EQ(reshard_replicas(executors[2], found, sizeof found[0], 2, &count), RESHARD_OK);
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(found[0].replica, kReplica);
  EXPECT_EQ(found[0].version, 5u);
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(reshard_release(executors[i], 30), RESHARD_OK) << reshard_error(executors[i]);
  for (reshard_executor *executor : executors)
    reshard_close(executor);
}

TEST_F(WrapperTest, Transforms) {
  compile("version: 1\n"
          "model:\n"
          "  dtype: fp32\n"
          "  tensors: {w: [2, 6]}\n"
          "  layouts:\n"
          "    train: {params: {w: {holds: w, shard: {0: tp}, transform: unpack}}}\n"
          "    serve: {params: {w: {holds: w, transform: pack}}}\n"
          "source: {layout: train, mesh: {tp: 2}}\n"
          "target: {layout: serve, mesh: {}, ranks: [2]}\n");
  const reshard::PlanFile plan(path_);
  ASSERT_EQ(plan.params(0, 0).size() + plan.params(1, 2).size(), 2u);
  EXPECT_STREQ(plan.params(0, 0)[0].transform, "unpack");
  EXPECT_STREQ(plan.params(1, 2)[0].transform, "pack");
  EXPECT_EQ(plan.params(1, 2)[0].bytes, 48u);
  reshard::Executor executor(path_);
  std::vector<float> taken;
  int begun = 0;
  executor.setTransform("unpack", {[](const reshard_transformed &param) {
                                     std::fill_n(static_cast<float *>(param.memory), 6,
                                                 3.0f + static_cast<float>(param.rank));
                                   },
                                   nullptr, nullptr});
  EXPECT_EQ(thrown([&] { executor.prepare(); }),
            Thrown(RESHARD_BAD_BINDING, "rank 2 param 'w' needs finalize of the transform 'pack', which is not set"));
  const auto take = [&](const reshard_transformed &param) {
    EXPECT_THAT(std::vector(param.shape, param.shape + param.dimensions), ElementsAre(2, 6));
    if (!taken.empty())
      throw std::runtime_error("no room");
    taken.assign(static_cast<const float *>(param.memory), static_cast<const float *>(param.memory) + 12);
  };
  executor.setTransform("pack", {nullptr, [&](const reshard_transformed &) { ++begun; }, take});
  executor.prepare();
  executor.run(60);
  EXPECT_THAT(taken, ElementsAre(3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4));
  EXPECT_EQ(thrown([&] { executor.run(); }),
            Thrown(RESHARD_FAILED, "finalize of the transform 'pack' failed for param 'w' on rank 2"));
  EXPECT_EQ(begun, 2);
}

} // namespace
