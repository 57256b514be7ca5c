// SPDX-License-Identifier: Apache-2.0
// Params with a transform: values arrive, hooks are called once per run and in order, errors name the hook and the
// param; on a device hooks are called in prepare.

#include "executor/api/transforms.h"
#include "executor/transports/transport.h"
#include "reshard/reshard.h"
#include "tests/executor/allocations.h"
#include "tests/executor/cpu_device.h"
#include "tests/executor/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace reshard {
namespace {

using testing::ElementsAre;

/// Tensor w of two layers is sharded by rows in the source and by columns in the target; n is bound on both sides.
const std::string kJob =
    "version: 1\n"
    "model:\n"
    "  dtype: u8\n"
    "  index: {layer: 2}\n"
    "  tensors: {\"l.{layer}.w\": [4, 6], n: [8]}\n"
    "  layouts:\n"
    "    train: {params: {\"l.{layer}.w\": {holds: w, shard: {0: tp}, transform: unpack}, n: {holds: n}}}\n"
    "    serve: {params: {\"w{layer}\": {holds: w, shard: {1: tp}, pad: {0: 8}, transform: pack, refresh: absorb}, n: "
    "{holds: n}}}\n"
    "source: {layout: train, mesh: {tp: 2}}\n"
    "target: {layout: serve, mesh: {tp: 2}, ranks: 1..2}\n";

/// The caller's hooks. They record their calls, and fill sources with values that increase by one in each run.
struct Caller {
  std::vector<std::string> calls;
  std::map<std::string, std::vector<uint8_t>> taken; // by rank and name
  std::map<std::string, void *> memory;
  std::string fails;
  uint8_t run = 0;
  bool record = true;

  int call(const char *hook, const reshard_transformed &param) {
    if (!record)
      return 0;
    const std::string where = std::to_string(param.rank) + " " + param.name;
    calls.push_back(std::string(hook) + " " + where);
    void *&known = memory[std::to_string(param.endpoint) + " " + where];
    EXPECT_TRUE(!known || known == param.memory) << where;
    known = param.memory;
    return calls.back() == fails;
  }
  static uint8_t value(int layer, int64_t row, int64_t column, uint8_t run) {
    return static_cast<uint8_t>(100 * layer + 10 * row + column + run);
  }

  static int send(void *user, const reshard_transformed *param) {
    auto &caller = *static_cast<Caller *>(user);
    EXPECT_EQ(param->size, sizeof(reshard_transformed));
    EXPECT_STREQ(param->transform, "unpack");
    EXPECT_STREQ(param->dtype, "u8");
    EXPECT_EQ(param->endpoint, 0u);
    EXPECT_EQ(param->dimensions, 2u);
    EXPECT_EQ(param->bytes, static_cast<uint64_t>(param->shape[0] * param->shape[1]));
    EXPECT_EQ(param->stream, nullptr);
    for (int64_t row = 0; row < param->shape[0]; ++row)
      for (int64_t column = 0; column < param->shape[1]; ++column)
        static_cast<uint8_t *>(param->memory)[row * param->shape[1] + column] =
            value(param->name[2] - '0', 2 * param->rank + row, column, caller.run);
    return caller.call("send", *param);
  }
  static int receive(void *user, const reshard_transformed *param) {
    std::memset(param->memory, 0xEE, param->bytes);
    return static_cast<Caller *>(user)->call("receive", *param);
  }
  static int finalize(void *user, const reshard_transformed *param) {
    auto &caller = *static_cast<Caller *>(user);
    EXPECT_STREQ(param->transform, "pack");
    EXPECT_EQ(param->endpoint, 1u);
    const auto *bytes = static_cast<const uint8_t *>(param->memory);
    if (caller.record)
      caller.taken[std::to_string(param->rank) + " " + param->name].assign(bytes, bytes + param->bytes);
    return caller.call("finalize", *param);
  }
  static int refresh(void *user, const char *name, uint32_t rank) {
    auto &caller = *static_cast<Caller *>(user);
    if (caller.record)
      caller.calls.push_back(std::string(name) + " " + std::to_string(rank));
    return 0;
  }
};

class TransformsTest : public testing::Test {
public:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(tests::compile(kJob, folder_ / "plan"));
    ASSERT_EQ(reshard_open((folder_ / "plan").c_str(), nullptr, 0, nullptr, &executor_), RESHARD_OK) << error();
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_EQ(reshard_bind(executor_, 0, rank, "n", from_.data(), from_.size()), RESHARD_OK) << error();
      ASSERT_EQ(reshard_bind(executor_, 1, rank + 1, "n", to_[rank].data(), to_[rank].size()), RESHARD_OK) << error();
    }
  }
  void TearDown() override { reshard_close(executor_); }

  std::string error() const { return reshard_error(executor_); }
  std::string missing() { return reshard_prepare(executor_) == RESHARD_BAD_BINDING ? error() : "prepared"; }
  void set(const char *name, const reshard_transform &transform) {
    ASSERT_EQ(reshard_set_transform(executor_, name, &transform), RESHARD_OK) << error();
  }
  void prepare() {
    set("unpack", {sizeof(reshard_transform), Caller::send, nullptr, nullptr, &caller_});
    set("pack", {sizeof(reshard_transform), nullptr, Caller::receive, Caller::finalize, &caller_});
    ASSERT_EQ(reshard_set_hook(executor_, "absorb", Caller::refresh, &caller_), RESHARD_OK);
    ASSERT_EQ(reshard_prepare(executor_), RESHARD_OK) << error();
  }
  /// The expected bytes of a target's param: three columns of four rows, and four rows of padding.
  static std::vector<uint8_t> expected(int layer, uint32_t rank, uint8_t run) {
    std::vector<uint8_t> values(8 * 3);
    for (int64_t row = 0; row < 4; ++row)
      for (int64_t column = 0; column < 3; ++column)
        values[static_cast<size_t>(row * 3 + column)] = Caller::value(layer, row, 3 * (rank - 1) + column, run);
    return values;
  }

  tests::TemporaryFolder folder_;
  std::vector<uint8_t> from_ = std::vector<uint8_t>(8, 5), to_[2] = {std::vector<uint8_t>(8), std::vector<uint8_t>(8)};
  Caller caller_;
  reshard_executor *executor_ = nullptr;
};

} // namespace

TEST_F(TransformsTest, ValuesArriveAndHooksAreCalledInOrder) {
  prepare();
  for (caller_.run = 1; caller_.run < 4; ++caller_.run) {
    caller_.calls.clear();
    ASSERT_EQ(reshard_run(executor_, 60, nullptr), RESHARD_OK) << error();
    EXPECT_THAT(caller_.calls,
                ElementsAre("send 0 l.0.w", "send 0 l.1.w", "send 1 l.0.w", "send 1 l.1.w", "receive 1 w0",
                            "receive 1 w1", "receive 2 w0", "receive 2 w1", "finalize 1 w0", "finalize 1 w1",
                            "finalize 2 w0", "finalize 2 w1", "absorb 1", "absorb 2"));
    for (uint32_t rank = 1; rank < 3; ++rank)
      for (int layer = 0; layer < 2; ++layer)
        EXPECT_EQ(caller_.taken[std::to_string(rank) + " w" + std::to_string(layer)],
                  expected(layer, rank, caller_.run))
            << rank << " " << layer;
    EXPECT_EQ(to_[0], from_);
    EXPECT_EQ(to_[1], from_);
  }
  EXPECT_EQ(caller_.memory.size(), 8u); // call() checks that it is the same in every run
}

TEST_F(TransformsTest, AFailingHookFailsTheRun) {
  prepare();
  ASSERT_EQ(reshard_run(executor_, 60, nullptr), RESHARD_OK) << error();
  const std::pair<const char *, const char *> cases[] = {
      {"send 1 l.0.w", "prepare_send of the transform 'unpack' failed for param 'l.0.w' on rank 1"},
      {"receive 2 w1", "prepare_receive of the transform 'pack' failed for param 'w1' on rank 2"},
      {"finalize 1 w1", "finalize of the transform 'pack' failed for param 'w1' on rank 1"}};
  for (const auto &[fails, message] : cases) {
    caller_.fails = fails;
    caller_.calls.clear();
    EXPECT_EQ(reshard_run(executor_, 60, nullptr), RESHARD_FAILED);
    EXPECT_EQ(error(), message);
    EXPECT_EQ(caller_.calls.back(), fails); // no hook is called after it
    EXPECT_EQ(reshard_target_state(executor_), RESHARD_TORN);
    EXPECT_EQ(reshard_version(executor_), 1u);
  }
  caller_.fails.clear();
  EXPECT_EQ(reshard_run(executor_, 60, nullptr), RESHARD_OK) << error();
  EXPECT_EQ(reshard_target_state(executor_), RESHARD_COMPLETE);
}

TEST_F(TransformsTest, PrepareNamesAMissingHook) {
  EXPECT_EQ(missing(), "rank 0 param 'l.{layer}.w' needs prepare_send of the transform 'unpack', which is not set");
  set("unpack",
      {sizeof(reshard_transform), nullptr, nullptr, Caller::finalize, &caller_}); // the hook of the other side
  EXPECT_EQ(missing(), "rank 0 param 'l.{layer}.w' needs prepare_send of the transform 'unpack', which is not set");
  set("unpack", {sizeof(reshard_transform), Caller::send, nullptr, nullptr, &caller_});
  EXPECT_EQ(missing(), "rank 1 param 'w{layer}' needs finalize of the transform 'pack', which is not set");
  set("pack",
      {sizeof(reshard_transform), nullptr, nullptr, Caller::finalize, &caller_}); // prepare_receive may be missing
  EXPECT_EQ(missing(), "rank 1 param 'w{layer}' needs the hook 'absorb' after each run, which is not set");
  ASSERT_EQ(reshard_set_hook(executor_, "absorb", Caller::refresh, &caller_), RESHARD_OK);
  ASSERT_EQ(reshard_prepare(executor_), RESHARD_OK) << error();
  ASSERT_EQ(reshard_run(executor_, 60, nullptr), RESHARD_OK) << error();
  EXPECT_THAT(caller_.calls,
              ElementsAre("send 0 l.0.w", "send 0 l.1.w", "send 1 l.0.w", "send 1 l.1.w", "finalize 1 w0",
                          "finalize 1 w1", "finalize 2 w0", "finalize 2 w1", "absorb 1", "absorb 2"));
  EXPECT_EQ(caller_.taken["2 w1"], expected(1, 2, 0));
  const reshard_transform late = RESHARD_TRANSFORM_INITIALIZER;
  EXPECT_EQ(reshard_set_transform(executor_, "pack", &late), RESHARD_INVALID);
  EXPECT_EQ(error(), "set_transform after prepare: transforms are fixed");
}

TEST_F(TransformsTest, ParamsWithATransformCannotBeBound) {
  uint8_t memory[24];
  EXPECT_EQ(reshard_bind(executor_, 1, 1, "w0", memory, sizeof memory), RESHARD_BAD_BINDING);
  EXPECT_EQ(error(), "target rank 1 param 'w0' must not be bound: its memory belongs to the transform 'pack'");
  EXPECT_EQ(reshard_set_transform(executor_, "pack", nullptr), RESHARD_INVALID);
  EXPECT_EQ(error(), "the transform is NULL");
  EXPECT_EQ(reshard_set_transform(executor_, nullptr, nullptr), RESHARD_INVALID);
  EXPECT_EQ(reshard_set_transform(nullptr, "pack", nullptr), RESHARD_INVALID);
}

TEST_F(TransformsTest, PreparesAgainAfterAFailureWithQuantizedParams) {
  ASSERT_NO_FATAL_FAILURE(
      tests::compile("version: 1\n"
                     "model:\n"
                     "  dtype: fp32\n"
                     "  tensors: {w: [256, 256]}\n"
                     "  layouts:\n"
                     "    train: {params: {w: {holds: w, shard: {0: tp}, transform: unpack}}}\n"
                     "    serve: {params: {w: {holds: w, shard: {1: tp}, quantize: block_fp8, refresh: absorb}}}\n"
                     "source: {layout: train, mesh: {tp: 2}}\n"
                     "target: {layout: serve, mesh: {tp: 2}}\n",
                     folder_ / "quantized"));
  std::vector<std::vector<uint8_t>> held; // memory of the first executor, then of the second
  for (const bool twice : {false, true}) {
    reshard_close(executor_);
    ASSERT_EQ(reshard_open((folder_ / "quantized").c_str(), nullptr, 0, nullptr, &executor_), RESHARD_OK) << error();
    const size_t first = held.size();
    for (int i = 0; i < 4; ++i)
      held.emplace_back(i % 2 ? 2 * 4 : 256 * 128);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_EQ(reshard_bind(executor_, 1, rank, "w", held[first + 2 * rank].data(), 256 * 128), RESHARD_OK) << error();
      ASSERT_EQ(reshard_bind(executor_, 1, rank, "w_scale_inv", held[first + 2 * rank + 1].data(), 2 * 4), RESHARD_OK)
          << error();
    }
    const auto send = [](void *, const reshard_transformed *param) {
      for (uint64_t i = 0; i < param->bytes / sizeof(float); ++i)
        static_cast<float *>(param->memory)[i] = static_cast<float>(i % 1009) * static_cast<float>(param->rank + 1);
      return 0;
    };
    set("unpack", {sizeof(reshard_transform), send, nullptr, nullptr, nullptr});
    if (twice) {
      EXPECT_EQ(missing(), "rank 0 param 'w' needs the hook 'absorb' after each run, which is not set");
    }
    ASSERT_EQ(reshard_set_hook(executor_, "absorb", Caller::refresh, &caller_), RESHARD_OK);
    ASSERT_EQ(reshard_prepare(executor_), RESHARD_OK) << error();
    ASSERT_EQ(reshard_run(executor_, 60, nullptr), RESHARD_OK) << error();
  }
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(held[i] == held[4 + i]) << i;
    EXPECT_NE(std::count(held[i].begin(), held[i].end(), 0), static_cast<ptrdiff_t>(held[i].size())) << i;
  }
}

#ifdef COUNT_ALLOCATIONS
TEST_F(TransformsTest, RunsAllocateNothing) {
  prepare();
  caller_.record = false;
  tests::allocations = 0;
  tests::counting = true;
  for (int i = 0; i < 1000; ++i)
    reshard_run(executor_, 60, nullptr);
  tests::counting = false;
  EXPECT_EQ(tests::allocations, 0);
  EXPECT_EQ(reshard_version(executor_), 1000u);
}
#endif

namespace {

/// Records the arguments of hooks on a device.
struct Recorder {
  std::vector<std::string> calls;
  std::map<std::string, reshard_transformed> seen;
  int call(const char *hook, const reshard_transformed &param) {
    const std::string where = std::to_string(param.rank) + " " + param.name;
    calls.push_back(std::string(hook) + " " + where);
    seen[where] = param;
    return 0;
  }
};

} // namespace

TEST_F(TransformsTest, OnADeviceHooksAreCalledOnceInPrepare) {
  const std::unique_ptr<Plan> plan = tests::openPlan(folder_ / "plan");
  const tests::Ranks ranks = tests::fillRanks(*plan, 1);
  std::vector<LocalRank> locals = tests::locals(ranks);
  Recorder recorder;
  Transforms transforms;
  auto device = std::make_unique<tests::CpuDevice>(1);
  const void *stream = device->stream();
  RecordedOptions options{false, [&] { return transforms.prepare(); }, [&] { return transforms.finalize(); }};
  const std::unique_ptr<Transport> transport = makeRecordedTransport(std::move(device), nullptr, std::move(options));
  transforms.set("unpack", {sizeof(reshard_transform),
                            [](void *user, const reshard_transformed *param) {
                              return static_cast<Recorder *>(user)->call("send", *param);
                            },
                            nullptr, nullptr, &recorder});
  transforms.set("pack", {sizeof(reshard_transform), nullptr, nullptr,
                          [](void *user, const reshard_transformed *param) {
                            return static_cast<Recorder *>(user)->call("finalize", *param);
                          },
                          &recorder});
  ASSERT_EQ(transforms.bind(*plan, locals, *transport).message(), "");
  ASSERT_EQ(transport->prepare(*plan, locals, {}).message(), "");
  EXPECT_THAT(recorder.calls, ElementsAre("send 0 l.0.w", "send 0 l.1.w", "send 1 l.0.w", "send 1 l.1.w",
                                          "finalize 1 w0", "finalize 1 w1", "finalize 2 w0", "finalize 2 w1"));
  for (const auto &[where, param] : recorder.seen)
    EXPECT_EQ(param.stream, stream) << where;
  caller_.record = false;
  for (caller_.run = 1; caller_.run < 3; ++caller_.run) {
    for (const char *where : {"0 l.0.w", "0 l.1.w", "1 l.0.w", "1 l.1.w"}) {
      reshard_transformed param = recorder.seen[where];
      param.stream = nullptr;
      Caller::send(&caller_, &param);
    }
    ASSERT_EQ(transport->run({}).message(), "");
    for (uint32_t rank = 1; rank < 3; ++rank)
      for (int layer = 0; layer < 2; ++layer) {
        const reshard_transformed &param = recorder.seen[std::to_string(rank) + " w" + std::to_string(layer)];
        const auto *bytes = static_cast<const uint8_t *>(param.memory);
        EXPECT_EQ(std::vector(bytes, bytes + param.bytes), expected(layer, rank, caller_.run));
      }
  }
  EXPECT_EQ(recorder.calls.size(), 8u);
}

} // namespace reshard
