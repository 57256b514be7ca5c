// SPDX-License-Identifier: Apache-2.0
// Synthesized values must not change, since one release checks files that another wrote. The check finds every wrong
// byte.

#include "tests/verify/support.h"
#include "verify/check/check.h"

#include <cstring>

using namespace reshard;
using namespace reshard::tests;
using namespace reshard::tools;
using namespace reshard::verify;
namespace fbs = reshard::schema;

namespace {

// Expected values from a Python implementation of the definition in synthesize.h.
TEST(Synthesize, ValuesAreFrozen) {
  const struct {
    const char *tensor;
    uint64_t seed, element, value;
  } cases[] = {
      {"model.embed_tokens.weight", 0u, 0u, 0x84bcd2bc950200e1u},
      {"model.embed_tokens.weight", 0u, 1u, 0xd3720a4e05eb8de6u},
      {"model.embed_tokens.weight", 1u, 0u, 0x93993f93c49a3e7eu},
      {"model.layers.3.mlp.up_proj.weight", 0u, 12345678901u, 0xf659ff71096b2a11u},
      {"", 0u, 0u, 0xa39fc2e1dfa4ad33u},
      {"a", 18446744073709551614u, 9223372036854775808u, 0x5ed451bbf76a0f91u},
  };
  for (const auto &[tensor, seed, element, value] : cases)
    EXPECT_EQ(elementHash(tensorKey(tensor, seed), element), value) << tensor;
}

/// Sources and targets of a plan in memory. Targets are filled through the layouts with the right contents.
class Check : public testing::Test {
protected:
  void open(const std::string &yaml) {
    compile(yaml, folder_ / "p.rplan");
    reopen();
  }
  void reopen() {
    target_.reset();
    plan_ = openPlan(folder_ / "p.rplan");
    target_ = std::make_unique<Memory>(*plan_);
    ASSERT_EQ(target_->allocate(1).message(), "");
    for (const MeshRankMemory &rankMemory : target_->rankMemories()) {
      synthesize(*plan_, rankMemory, 5, 2);
      forEachBound(*plan_, rankMemory, [&](const fbs::ParamInstance &instance, std::byte *memory) {
        const fbs::Endpoint &endpoint = *plan_->manifest().endpoints()->Get(1);
        const int64_t item = fbs::itemBytes(endpoint.params()->Get(instance.param)->dtype());
        fbs::forEachRange(
            {plan_->manifest(), endpoint, rankMemory.meshRank, instance}, [&](const fbs::ElementRange &run) {
              for (int64_t k = 0; !run.tensor && k < run.count; ++k) {
                std::byte *at = memory + (run.local + k * run.localStep) * item;
                EXPECT_EQ(*at, std::byte{0xAB}); // the value of source padding, which must not reach a target
                std::memset(at, 0, static_cast<size_t>(item));
              }
            });
      });
    }
  }

  TemporaryFolder folder_;
  std::unique_ptr<Plan> plan_;
  std::unique_ptr<Memory> target_;
};

const char *const kJob =
    R"({version: 1, model: {dtype: DTYPE, index: {expert: 2}, tensors: {"e.{expert}.g": [2, 3], "e.{expert}.u": [2, 3], s: []}, layouts: {
    a: {params: {"g{expert}": {holds: g}, "u{expert}": {holds: u}, s: {holds: s}}}, b: {params: {s: {holds: s}, w: {stack: expert, concat: [g, u], shard: {1: tp}, pad: {2: 4}}}}}},
    source: {layout: a, mesh: {}}, target: {layout: b, mesh: {tp: 2}}})";

std::string job(const std::string &dtype) {
  std::string text = kJob;
  return text.replace(text.find("DTYPE"), 5, dtype);
}

TEST_F(Check, FindsEverySingleWrongByte) {
  for (const char *dtype : {"bool", "fp8_e4m3", "bf16", "fp32", "i64"}) {
    open(job(dtype));
    for (const MeshRankMemory &rankMemory : target_->rankMemories()) {
      const CheckResult good = check(*plan_, rankMemory, 5, 2);
      EXPECT_EQ(good.mismatches, 0u) << good.first;
      EXPECT_EQ(good.first, "");
      uint64_t bytes = 0;
      forEachBound(*plan_, rankMemory, [&](const fbs::ParamInstance &instance, std::byte *memory) {
        bytes += static_cast<uint64_t>(instance.bytes);
        for (int64_t i = 0; i < instance.bytes; ++i) {
          memory[i] ^= std::byte{0x40};
          const CheckResult bad = check(*plan_, rankMemory, 5, 1);
          memory[i] ^= std::byte{0x40};
          EXPECT_EQ(bad.mismatches, 1u) << dtype << " " << instance.name << " byte " << i;
          EXPECT_NE(bad.first.find("'" + instance.name + "'"), std::string::npos) << bad.first;
        }
      });
      EXPECT_EQ(good.checkedBytes, bytes);
      EXPECT_GT(check(*plan_, rankMemory, 6, 1).mismatches, 0u); // another seed gives other values
    }
  }
}

TEST_F(Check, NamesTheWrongElement) {
  open(job("bf16"));
  const MeshRankMemory &rankMemory = target_->rankMemories()[1];
  // w on rank 1 is [2 experts, 2 of g and u, 4]: expert 1's row of g begins at element 8 of w, and is row 1 of g.
  uint32_t w = 0;
  forEachBound(*plan_, rankMemory,
               [&](const fbs::ParamInstance &instance, std::byte *) { w = instance.name == "w" ? instance.param : w; });
  const uint16_t expected = static_cast<uint16_t>(elementHash(tensorKey("e.1.g", 5), 4));
  const uint16_t found = static_cast<uint16_t>(expected ^ 0x0100);
  std::memcpy(rankMemory.params[w][0] + 2 * 9, &found, 2);
  char text[100];
  std::snprintf(text, sizeof text,
                "target rank 1 param 'w' element 9 ('e.1.g' element 4): found 0x%04x, expected 0x%04x", found,
                expected);
  EXPECT_EQ(check(*plan_, rankMemory, 5, 1).first, text);
  std::memcpy(rankMemory.params[w][0] + 2 * 9, &expected, 2);
  rankMemory.params[w][0][2 * 3] = std::byte{1};
  EXPECT_EQ(check(*plan_, rankMemory, 5, 1).first,
            "target rank 1 param 'w' element 3 (padding): found 0x0001, expected 0x0000");
}

TEST_F(Check, BoolsAreZeroOrOne) {
  open(R"({version: 1, model: {dtype: bool, tensors: {a: [1000]}}, source: {mesh: {}}, target: {mesh: {}}})");
  int ones = 0;
  for (int i = 0; i < 1000; ++i) {
    const int value = std::to_integer<int>(target_->rankMemories()[0].params[0][0][i]);
    ASSERT_LE(value, 1);
    ones += value;
  }
  EXPECT_GT(ones, 400);
  EXPECT_LT(ones, 600);
}

TEST_F(Check, ElementsOfNoPartAreMismatches) {
  open(job("bf16"));
  UnpackedPlan parts = unpack(folder_ / "p.rplan");
  for (auto &param : parts.manifest->endpoints[1]->params)
    if (param->name == "w") {
      ASSERT_GE(param->parts.size(), 3u);
      param->parts[0] = std::make_unique<fbs::PartT>(
          *param->parts[1]); // the number of elements is unchanged, but one part is missing
    }
  pack(parts, folder_ / "p.rplan");
  reopen();
  const CheckResult result = check(*plan_, target_->rankMemories()[0], 5, 1);
  EXPECT_EQ(result.mismatches, 6u); // 2 experts, a row of 3
  EXPECT_EQ(result.first, "param 'w': 6 of 16 elements are covered by no part of its layout");
}

} // namespace
