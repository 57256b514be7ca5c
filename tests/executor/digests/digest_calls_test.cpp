// SPDX-License-Identifier: Apache-2.0
// reshard_digest and checked runs through the C++ API: results, states, versions, and the text of every error.

#include "reshard/reshard.hpp"

#include "tests/executor/thrown.h"
#include "tests/verify/support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <optional>

namespace reshard {

namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using tests::thrown;
using tests::Thrown;

/// Ranks 0 to 3 hold the source, two replicas of two halves, and the target, four quarters.
const std::string kJob = "version: 1\nmodel: {dtype: fp32, tensors: {w: {shape: [8, 3], shard: {0: tp}}, b: [2]}}\n"
                         "source: {mesh: {tp: 2, dp: 2}}\ntarget: {mesh: {tp: 4}}\n";

class DigestCallsTest : public testing::Test {
public:
  void open(const std::string &yaml) {
    ASSERT_NO_FATAL_FAILURE(tests::compile(yaml, folder_ / "plan"));
    executor_.emplace(folder_ / "plan");
  }
  /// Binds all params but transformed ones; the source's elements are their indices in the instance.
  void bind() {
    const PlanFile plan(folder_ / "plan");
    for (uint32_t endpoint = 0; endpoint < 2; ++endpoint) {
      const reshard_endpoint at = plan.endpoint(endpoint);
      for (size_t r = 0; r < at.rank_count; ++r)
        for (const reshard_param &param : plan.params(endpoint, at.ranks[r])) {
          if (*param.transform)
            continue;
          std::vector<float> &values = memory_.emplace_back(param.bytes / sizeof(float));
          for (size_t i = 0; i < values.size() && endpoint == 0; ++i)
            values[i] = static_cast<float>(i + 1);
          places_[{endpoint, at.ranks[r], param.name}] = &values;
          executor_->bind(endpoint, at.ranks[r], param.name, values.data(), param.bytes);
        }
    }
  }
  std::map<std::string, std::string> digest(uint32_t endpoint) {
    std::map<std::string, std::string> texts;
    for (const reshard_tensor_digest &each : executor_->digest(endpoint))
      texts[each.tensor] = each.digest;
    return texts;
  }

  const tests::TemporaryFolder folder_;
  std::deque<std::vector<float>> memory_;
  std::map<std::tuple<uint32_t, uint32_t, std::string>, std::vector<float> *> places_;
  std::optional<Executor> executor_;
};

} // namespace

TEST_F(DigestCallsTest, ChecksRunsAndRunsAgainAfterAMismatch) {
  ASSERT_NO_FATAL_FAILURE(open(kJob));
  reshard_check check = RESHARD_CHECK_INITIALIZER;
  EXPECT_EQ(thrown([&] { executor_->digest(0); }), Thrown(RESHARD_INVALID, "digest before prepare"));
  EXPECT_EQ(thrown([&] { executor_->run(0, &check); }), Thrown(RESHARD_INVALID, "a checked run before prepare"));
  bind();
  executor_->prepare();
  executor_->run(60, &check);
  EXPECT_EQ(executor_->version(), 1u);
  EXPECT_EQ(executor_->state(), RESHARD_COMPLETE);
  EXPECT_EQ(digest(0), digest(1));
  EXPECT_EQ(digest(0).size(), 2u);

  std::vector<float> &replica = *places_.at({0, 3, "w"}); // from which rank 3 copies
  replica[11] = -1;
  check.first_index = 1;
  EXPECT_EQ(thrown([&] { executor_->run(0, &check); }),
            Thrown(RESHARD_FAILED, "the targets differ from the source after the run: tensor 'w' is wrong on target "
                                   "rank 3, first at index [7, 2] on rank 3"));
  EXPECT_EQ(executor_->state(), RESHARD_TORN);
  EXPECT_EQ(executor_->version(), 1u);
  EXPECT_NE(digest(0), digest(1)); // of the target's wrong element, and of the source's first replica
  replica[11] = 12;
  check.changed = 1;
  EXPECT_EQ(thrown([&] { executor_->run(0, &check); }),
            Thrown(RESHARD_INVALID,
                   "the source has not changed since the last run that was checked: the digests of all "
                   "its tensors are the same"));
  EXPECT_EQ(executor_->state(), RESHARD_TORN); // nothing was moved
  for (const uint32_t rank : {0u, 1u, 2u, 3u})
    (*places_.at({0, rank, "b"}))[1] = 7;
  executor_->run(0, &check);
  EXPECT_EQ(executor_->state(), RESHARD_COMPLETE);
  EXPECT_EQ(executor_->version(), 2u);
  EXPECT_EQ(digest(0), digest(1));
}

TEST_F(DigestCallsTest, ListsTensorsInElementsOfTheCallersSize) {
  ASSERT_NO_FATAL_FAILURE(open(kJob));
  bind();
  executor_->prepare();
  executor_->run();
  struct Newer {
    reshard_tensor_digest known;
    uint64_t added;
  };
  const reshard_tensor_digest *list = nullptr;
  size_t count = 0;
  ASSERT_EQ(reshard_digest(executor_->handle(), 1, 0, 0, sizeof(Newer), &list, &count), RESHARD_OK);
  ASSERT_EQ(count, 2u);
  const auto *newer = reinterpret_cast<const Newer *>(list);
  EXPECT_EQ(newer[1].known.size, sizeof(Newer));
  EXPECT_STREQ(newer[0].known.tensor, "w");
  EXPECT_STREQ(newer[1].known.tensor, "b");
  EXPECT_STREQ(newer[0].known.dtype, "fp32");
  ASSERT_EQ(newer[0].known.dimensions, 2u);
  EXPECT_EQ(newer[0].known.shape[0], 8);
  EXPECT_EQ(newer[0].known.elements, 24u);
  EXPECT_EQ(std::string(newer[0].known.digest).size(), 32u);
  EXPECT_EQ(newer[1].added, 0u);
}

TEST_F(DigestCallsTest, ElementsThatAnEndpointLacksLeaveNoDigest) {
  ASSERT_NO_FATAL_FAILURE(open("version: 1\nmodel:\n  dtype: fp32\n  tensors: {a: [4, 6]}\n  layouts:\n"
                               "    part: {params: {a: {pieces: [{shape: [2, 6], of: [{of: a, size: [2, 6]}]}]}}}\n"
                               "source: {mesh: {}}\ntarget: {layout: part, mesh: {}, ranks: 1}\n"));
  bind();
  executor_->prepare();
  reshard_check check = RESHARD_CHECK_INITIALIZER;
  executor_->run(0, &check);
  EXPECT_EQ(digest(1), (std::map<std::string, std::string>{{"a", ""}}));
  EXPECT_EQ(executor_->digest(1)[0].elements, 12u);
}

TEST_F(DigestCallsTest, TransformedParamsAreUndigested) {
  ASSERT_NO_FATAL_FAILURE(open("version: 1\nmodel:\n  dtype: fp32\n  tensors: {a: [4], b: [3]}\n  layouts:\n"
                               "    engine: {params: {a: {holds: a}, b: {holds: b, transform: pack}}}\n"
                               "source: {mesh: {}}\ntarget: {layout: engine, mesh: {}, ranks: 1}\n"));
  bind();
  executor_->setTransform("pack", {{}, {}, [](const reshard_transformed &) {}});
  executor_->prepare();
  const std::string text =
      "expected params that hold elements of tensors on both sides, found quantized or transformed "
      "ones: target param 'b'";
  EXPECT_EQ(thrown([&] { executor_->digest(1); }), Thrown(RESHARD_INVALID, text));
  reshard_check check = RESHARD_CHECK_INITIALIZER;
  EXPECT_EQ(thrown([&] { executor_->run(0, &check); }), Thrown(RESHARD_INVALID, text));
  EXPECT_EQ(executor_->state(), RESHARD_EMPTY);
  check.allow_undigested = 1;
  executor_->run(0, &check);
  EXPECT_THAT(executor_->undigested(), ElementsAre("target param 'b'"));
  EXPECT_EQ(executor_->digest(1, true).size(), 1u);
  EXPECT_EQ(digest(0).size(), 2u);
  EXPECT_THAT(executor_->undigested(), ElementsAre());
}

TEST_F(DigestCallsTest, WrongArguments) {
  ASSERT_NO_FATAL_FAILURE(open(kJob));
  bind();
  executor_->prepare();
  EXPECT_EQ(thrown([&] { executor_->digest(2); }), Thrown(RESHARD_INVALID, "there is no endpoint 2, the plan has 2"));
  const reshard_tensor_digest *list = nullptr;
  size_t count = 0;
  EXPECT_EQ(reshard_digest(executor_->handle(), 0, 0, 0, 3, &list, &count), RESHARD_INVALID);
  EXPECT_THAT(reshard_error(executor_->handle()), HasSubstr("expected an array and a count of reshard_tensor_digest"));
  EXPECT_EQ(reshard_digest(executor_->handle(), 0, 0, 0, sizeof *list, nullptr, &count), RESHARD_INVALID);
  reshard_check check{};
  EXPECT_EQ(reshard_run(executor_->handle(), 0, &check), RESHARD_INVALID);
  EXPECT_THAT(reshard_error(executor_->handle()), HasSubstr("initialize the struct with RESHARD_CHECK_INITIALIZER"));
  check = RESHARD_CHECK_INITIALIZER;
  EXPECT_EQ(reshard_run(executor_->handle(), 0, &check), RESHARD_OK);
  EXPECT_EQ(reshard_undigested(nullptr, &count), nullptr);
  EXPECT_EQ(count, 0u);
}

TEST_F(DigestCallsTest, APlanThatMovesNoBytesFailsACheckedRun) {
  ASSERT_NO_FATAL_FAILURE(open("version: 1\nmodel: {dtype: bf16, tensors: {a: [0, 4]}}\n"
                               "source: {mesh: {}}\ntarget: {mesh: {}, ranks: 1}\n"));
  bind();
  executor_->prepare();
  executor_->run();
  reshard_check check = RESHARD_CHECK_INITIALIZER;
  EXPECT_EQ(thrown([&] { executor_->run(0, &check); }),
            Thrown(RESHARD_INVALID, "the plan moves no bytes: no target has a param with elements"));
}

} // namespace reshard
