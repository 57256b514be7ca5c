// SPDX-License-Identifier: Apache-2.0
// Quantized params: synthesized, run, checked byte by byte, verified, compared and counted. quantize_test.py compares
// the values with another implementation.

#include <gmock/gmock.h>

#include "base/work_deadline.h"
#include "report/diff/difference.h"
#include "report/inspect/inspection.h"
#include "report/inspect/quantized_forms.h"
#include "reshard/reshard.h"
#include "reshard/reshard_plan.h"
#include "schema/flatbuffer_vectors.h"
#include "tests/verify/support.h"
#include "verify/check/compare.h"
#include "verify/proof/plan_verifier.h"

#include <cmath>
#include <cstring>

using namespace reshard;
using namespace reshard::tests;
using namespace reshard::checkpoints;
using namespace reshard::report;
using namespace reshard::tools;
using namespace reshard::verify;
namespace fbs = reshard::schema;

namespace {

/// Two layers of a matrix [rows, 96] and a vector, from two ranks (twice) to four.
std::string job(int rows, const std::string &source, const std::string &target) {
  return R"({version: 1, model: {dtype: bf16, index: {layer: 2}, tensors: {"l.{layer}.w": {shape: [)" +
         std::to_string(rows) + ", 96], shard: {0: tp}}, n: [8]}}, source: {mesh: {tp: 2, dp: 2}" + source +
         "}, target: {mesh: {tp: 4}" + target + "}}";
}
std::string quantized(const std::string &how) { return ", quantize: " + how; }

const struct {
  const char *source, *target;
  int rows;
  QuantizedBy by;
} kJobs[] = {
    {"", "mxfp8", 8, QuantizedBy::arrival},
    {"", "{format: mxfp8, scale_layout: swizzled}", 8, QuantizedBy::arrival},
    {"", "{format: mxfp8, by: sender}", 8, QuantizedBy::sender},
    {"", "{format: mxfp8, by: sender, scale_layout: swizzled}", 8, QuantizedBy::sender},
    {"", "{format: block_fp8, by: receiver}", 8, QuantizedBy::staged},
    {"", "block_fp8", 512, QuantizedBy::sender},
    {"mxfp8", "mxfp8", 8, QuantizedBy::passthrough},
    {"{format: mxfp8, scale_layout: swizzled}", "{format: mxfp8, scale_layout: swizzled}", 8, QuantizedBy::passthrough},
    {"mxfp8", "{format: block_fp8, by: receiver}", 8, QuantizedBy::staged},
    {"block_fp8", "{format: mxfp8, scale_layout: swizzled}", 8, QuantizedBy::arrival},
    {"{format: mxfp8, scale_layout: swizzled}", "", 8, QuantizedBy::held},
    {"block_fp8", "", 8, QuantizedBy::held},
    {"{format: nvfp4, scale_layout: swizzled}", "", 8, QuantizedBy::held},
    {"", "{format: nvfp4, scale_layout: swizzled}", 8, QuantizedBy::arrival},
    {"mxfp8", "nvfp4", 8, QuantizedBy::arrival},
    {"nvfp4", "{format: nvfp4, scale_layout: swizzled}", 8, QuantizedBy::passthrough},
    {"", "{format: mxfp4, by: sender}", 8, QuantizedBy::arrival}, // senders do not write two codes in a byte
    {"mxfp4", "{format: mxfp4, scale_layout: swizzled}", 8, QuantizedBy::passthrough},
    {"", "{format: mxfp4, codes_shape: blocks}", 8, QuantizedBy::arrival},
    {"{format: mxfp4, codes_shape: blocks}", "mxfp4", 8, QuantizedBy::arrival}, // codes in blocks are not copied
    {"", "int4", 8, QuantizedBy::arrival},
    {"{format: int4, shape: '{name}_shape'}", "", 8, QuantizedBy::held},
    {"int4", "int4", 8, QuantizedBy::passthrough},
    {"", "{format: block_fp8_ue8m0, scale_layout: packed}", 512, QuantizedBy::sender},
    {"", "{format: block_fp8_ue8m0, by: receiver, scale_layout: packed}", 8, QuantizedBy::staged},
    {"block_fp8_ue8m0", "{format: block_fp8_ue8m0, scale_layout: packed}", 512, QuantizedBy::passthrough},
    {"{format: block_fp8_ue8m0, scale_layout: packed}", "block_fp8_ue8m0", 512, QuantizedBy::passthrough},
    {"{format: block_fp8_ue8m0, scale_layout: packed}", "", 8, QuantizedBy::held},
};

class QuantizedPlan : public testing::Test {
protected:
  void open(const std::string &yaml) {
    compile(yaml, folder_ / "p.rplan");
    plan_ = openPlan(folder_ / "p.rplan");
    source_ = std::make_unique<Memory>(*plan_);
    target_ = std::make_unique<Memory>(*plan_);
    ASSERT_EQ(source_->allocate(0).message(), "");
    ASSERT_EQ(target_->allocate(1).message(), "");
    for (const MeshRankMemory &rankMemory : source_->rankMemories())
      synthesize(*plan_, rankMemory, 5, 2);
  }
  const fbs::Endpoint &endpoint(uint32_t number) const { return *plan_->manifest().endpoints()->Get(number); }

  template <class Visit> void forEachBound(const MeshRankMemory &rankMemory, Visit visit) const {
    tests::forEachBound(*plan_, rankMemory, visit);
  }
  CheckResult compareSides(unsigned threads = 2, const CompareWatch &watch = {}) const {
    return compare(*plan_, source_->rankMemories(), target_->rankMemories(), threads, watch);
  }
  std::byte *find(const MeshRankMemory &rankMemory, const std::string &name) const {
    std::byte *found = nullptr;
    forEachBound(rankMemory, [&](const fbs::ParamInstance &instance, std::byte *memory) {
      found = instance.name == name ? memory : found;
    });
    return found;
  }

  void run() const {
    reshard_options options = RESHARD_OPTIONS_INITIALIZER;
    options.threads = 2;
    reshard_executor *executor = nullptr;
    ASSERT_EQ(reshard_open((folder_ / "p.rplan").c_str(), nullptr, 0, &options, &executor), RESHARD_OK)
        << reshard_error(executor);
    for (const Memory *memory : {source_.get(), target_.get()})
      for (const MeshRankMemory &rankMemory : memory->rankMemories())
        bindAll(executor, *plan_, rankMemory);
    ASSERT_EQ(reshard_prepare(executor), RESHARD_OK) << reshard_error(executor);
    ASSERT_EQ(reshard_run(executor, 60, nullptr), RESHARD_OK) << reshard_error(executor);
    reshard_close(executor);
  }

  TemporaryFolder folder_;
  std::unique_ptr<Plan> plan_;
  std::unique_ptr<Memory> source_, target_;
};

TEST_F(QuantizedPlan, TheCheckFindsEveryWrongByte) {
  for (const auto &[source, target, rows, by] : kJobs) {
    SCOPED_TRACE(std::string(source) + " -> " + target);
    open(job(rows, *source ? quantized(source) : "", *target ? quantized(target) : ""));
    run();
    EXPECT_EQ(verifyPlan(*plan_, [](double) {}).error, "");
    const QuantizedCounts counts = countQuantized(plan_->manifest(), *target ? 1 : 0);
    const Result<uint64_t> staged = peakStagedBytes(*plan_);
    ASSERT_EQ(staged.status().message(), "");
    EXPECT_EQ(by == QuantizedBy::staged, *staged >= 8 / 4 * 96 * 2) << *staged; // the rows of one rank
    ASSERT_EQ(counts.params.size(), 1u);
    EXPECT_EQ(counts.params.begin()->first, by);
    EXPECT_EQ(counts.params.begin()->second.begin()->second, 8); // two layers on four mesh ranks
    const CheckResult compared = compareSides();
    EXPECT_EQ(compared.mismatches, 0u) << compared.first;
    EXPECT_EQ(compared.ambiguity, "");
    for (const MeshRankMemory &rankMemory : target_->rankMemories()) {
      const CheckResult good = check(*plan_, rankMemory, 5, 2);
      EXPECT_EQ(good.mismatches, 0u) << good.first;
      EXPECT_EQ(good.ambiguity, "");
      EXPECT_GT(check(*plan_, rankMemory, 6, 2).mismatches, 0u);
      uint64_t bytes = 0;
      forEachBound(rankMemory, [&](const fbs::ParamInstance &instance, std::byte *memory) {
        bytes += static_cast<uint64_t>(instance.bytes);
        if (rankMemory.meshRank != 1)
          return;
        const int64_t step = std::max<int64_t>(
            1, instance.bytes / 97); // only some bytes of large params, with a step that is not a block size
        for (int64_t i = 0; i < instance.bytes; i += step) {
          memory[i] ^= std::byte{0x10};
          const CheckResult bad = check(*plan_, rankMemory, 5, 1);
          EXPECT_EQ(bad.mismatches, 1u) << instance.name << " byte " << i;
          EXPECT_THAT(bad.first, testing::HasSubstr("param '" + instance.name + "' element ")) << bad.first;
          if (i == 0) {
            EXPECT_EQ(compareSides(1).mismatches, 1u);
          }
          memory[i] ^= std::byte{0x10};
        }
      });
      EXPECT_EQ(good.checkedBytes, bytes);
    }
  }
}

TEST_F(QuantizedPlan, LargeParamsAreCheckedInBands) {
  // Two matrices of 1.5 million elements, each more than a band; the source has them in two parts that cut blocks.
  for (const char *format :
       {"block_fp8", "{format: block_fp8_ue8m0, by: receiver, scale_layout: packed}",
        "{format: mxfp8, scale_layout: swizzled}", "mxfp4", "{format: nvfp4, scale_layout: swizzled}"}) {
    SCOPED_TRACE(format);
    open(std::string("{version: 1, model: {dtype: bf16, tensors: {w: {shape: [2, 1500, 1024], shard: {1: tp}}}}, "
                     "source: {mesh: {tp: 2}}, "
                     "target: {mesh: {tp: 1}, quantize: ") +
         format + "}}");
    run();
    const MeshRankMemory &rankMemory = target_->rankMemories()[0];
    const CheckResult good = check(*plan_, rankMemory, 5, 2);
    EXPECT_EQ(good.mismatches, 0u) << good.first;
    uint64_t bytes = 0;
    forEachBound(rankMemory, [&](const fbs::ParamInstance &instance, std::byte *memory) {
      bytes += static_cast<uint64_t>(instance.bytes);
      const int64_t item = fbs::itemBytes(endpoint(1).params()->Get(instance.param)->dtype());
      for (const int64_t at : {int64_t{0}, instance.bytes / 2, instance.bytes - 1}) {
        memory[at] ^= std::byte{0x10};
        const CheckResult bad = compareSides();
        EXPECT_EQ(bad.mismatches, 1u) << instance.name << " byte " << at;
        EXPECT_THAT(bad.first,
                    testing::HasSubstr("param '" + instance.name + "' element " + std::to_string(at / item) + " "));
        memory[at] ^= std::byte{0x10};
      }
    });
    EXPECT_EQ(good.checkedBytes, bytes);
  }
}

TEST_F(QuantizedPlan, ThereIsRoomForLessThanOneCopy) {
  // Dequantized tensors are copied, one at a time.
  for (const char *source : {"mxfp8", "{format: nvfp4, scale_layout: swizzled}"}) {
    open(job(8, quantized(source), ""));
    run();
    CompareWatch watch;
    watch.copies = 100;
    EXPECT_EQ(compareSides(4, watch).mismatches, 0u);
    forEachBound(target_->rankMemories()[2], [&](const fbs::ParamInstance &instance, std::byte *memory) {
      memory[1] ^= std::byte{0x10};
      EXPECT_EQ(compareSides(4, watch).mismatches, 1u) << instance.name;
      memory[1] ^= std::byte{0x10};
    });
  }
}

/// Gives each matrix of an instance a scale of its own: multiplies scales, or elements of bf16, by powers of two.
void scaleMatrices(const fbs::Param &param, const fbs::ParamInstance &instance, int64_t matrices, std::byte *memory) {
  const bool scales = instance.name.find("_scale") != std::string::npos;
  const int64_t item = fbs::itemBytes(param.dtype()), each = instance.bytes / item / matrices;
  for (int64_t i = 0; i < each * matrices; ++i) {
    const auto by = static_cast<unsigned>(i / each);
    std::byte *const at = memory + i * item;
    uint32_t code = 0;
    std::memcpy(&code, at, static_cast<size_t>(item));
    if (code == 0)
      continue; // padding
    if (param.dtype() == fbs::DType::bf16)
      code += by << 7;
    else if (param.dtype() == fbs::DType::fp32)
      code += by << 23;
    else if (scales && param.dtype() != fbs::DType::fp8_e4m3) // exponents; of a packed number, the first of its four
      code += by;
    std::memcpy(at, &code, static_cast<size_t>(item));
  }
}

TEST_F(QuantizedPlan, OfAStackTheMatricesOfATensorAreRead) {
  // Experts are stacked on dimension 1, so that each has a matrix in both halves of the param.
  const std::string swizzled = "{format: mxfp8, scale_layout: swizzled}";
  for (const auto &[from, to] : {std::pair<std::string, std::string>("mxfp8", ""),
                                 {swizzled, ""},
                                 {"block_fp8", ""},
                                 {"mxfp4", ""},
                                 {"int4", ""},
                                 {"{format: nvfp4, scale_layout: swizzled}", ""},
                                 {"{format: block_fp8_ue8m0, scale_layout: packed}", ""},
                                 {"", "{format: mxfp8, by: sender}"},
                                 {"", "{format: mxfp8, by: sender, scale_layout: swizzled}"},
                                 {swizzled, swizzled}}) {
    SCOPED_TRACE(from + " to " + to);
    open("{version: 1, model: {dtype: bf16, index: {expert: 8}, tensors: {"
         "'e.{expert}': [2, 64, 96], g: [64, 96]}, layouts: {stacked: {params: {"
         "e: {stack: {index: expert, dim: 1}, holds: 'e.{expert}'}, g: {holds: g}}}}}, "
         "source: {layout: stacked, mesh: {tp: 1}" +
         (from.empty() ? "" : quantized(from)) + "}, target: {mesh: {tp: 1}" + (to.empty() ? "" : quantized(to)) +
         "}}");
    forEachBound(source_->rankMemories()[0], [&](const fbs::ParamInstance &instance, std::byte *memory) {
      scaleMatrices(*endpoint(0).params()->Get(instance.param), instance, instance.name[0] == 'e' ? 16 : 1, memory);
    });
    run();
    if (to.empty()) { // a matrix, and the tensor: one matrix for g, two for an expert
      Reference reference(*plan_, source_->rankMemories());
      EXPECT_EQ(reference.copiedBytes("g"), 2u * 2 * 64 * 96);
      EXPECT_EQ(reference.copiedBytes("e.3"), 3u * 2 * 64 * 96);
    }
    for (const unsigned threads : {1, 4}) {
      const CheckResult good = compareSides(threads);
      EXPECT_EQ(good.mismatches, 0u) << good.first;
      EXPECT_GE(good.checkedBytes, (to.empty() ? 2u : 1u) * (16 + 1) * 64 * 96);
    }
    forEachBound(target_->rankMemories()[0], [&](const fbs::ParamInstance &instance, std::byte *memory) {
      memory[instance.bytes - 1] ^= std::byte{0x10};
      const CheckResult bad = compareSides();
      EXPECT_EQ(bad.mismatches, 1u) << instance.name;
      memory[instance.bytes - 1] ^= std::byte{0x10};
    });
  }
}

TEST_F(QuantizedPlan, EachMatrixIsDequantizedOnceForATensorInAnotherOrder) {
  // Each row of the tensor is in another matrix. Dequantizing one for each row would take 45 s.
  open("{version: 1, model: {dtype: bf16, tensors: {e: [4096, 64, 256]}, layouts: {permuted: {params: {"
       "p: {holds: e, permute: [1, 0, 2]}}}}}, source: {layout: permuted, mesh: {tp: 1}, quantize: mxfp8}, "
       "target: {mesh: {tp: 1}}}");
  run();
  CompareWatch watch;
  watch.copies = 100;
  CheckResult good;
  const Status inTime = WorkDeadline::run("the check", 20, [&] {
    good = compareSides(2, watch);
    return Status();
  });
  EXPECT_TRUE(inTime.ok()) << inTime.message();
  EXPECT_EQ(good.mismatches, 0u) << good.first;
  EXPECT_EQ(good.checkedBytes, 2u * 4096 * 64 * 256);
}

TEST_F(QuantizedPlan, SynthesizedBlocksAreNearTheirElements) {
  // Compares dequantized targets with the targets of the same job without quantization. Few elements may be 0.
  for (const auto &[format, near] :
       {std::pair("mxfp8", 1.0 / 16), std::pair("block_fp8", 1.0 / 16), std::pair("nvfp4", 1.0 / 2)}) {
    open(job(8, quantized(format), ""));
    int64_t zeros = 0, elements = 0;
    for (const MeshRankMemory &rankMemory : source_->rankMemories()) {
      const fbs::Endpoint &source = endpoint(0);
      for (uint32_t p = 0; p < source.params()->size(); ++p) {
        const fbs::QuantizedView *view = source.params()->Get(p)->view();
        for (const fbs::ParamInstance &instance : fbs::instances(plan_->manifest(), source, p, rankMemory.meshRank)) {
          if (!view)
            continue;
          std::vector<const std::byte *> memory;
          for (const uint32_t base : baseParams(*view))
            memory.push_back(rankMemory.params[base][instance.instance]);
          const Bytes wide = readMatrix(source, p, rankMemory.meshRank, memory, 0);
          fbs::forEachRange(
              {plan_->manifest(), source, rankMemory.meshRank, instance}, [&](const fbs::ElementRange &run) {
                for (int64_t k = 0; k < run.count; ++k, ++elements) {
                  auto value = [](uint16_t code) {
                    const uint32_t bits = uint32_t{code} << 16;
                    float result;
                    std::memcpy(&result, &bits, sizeof result);
                    return result;
                  };
                  uint16_t found = 0;
                  std::memcpy(&found, wide.data() + 2 * (run.local + k * run.localStep), 2);
                  // By definition (synthesize.h), exponents are 112 to 127.
                  const uint64_t hash =
                      elementHash(tensorKey(*run.tensor, 5), static_cast<uint64_t>(run.logical + k * run.logicalStep));
                  const auto code = static_cast<uint16_t>((hash & 0xBFFF) | 0x3800);
                  zeros += value(found) == 0;
                  EXPECT_LE(std::abs(value(found) - value(code)),
                            near * std::abs(value(code)) + std::ldexp(1.0, format == std::string("nvfp4") ? -2 : -17))
                      << format;
                }
              });
        }
      }
    }
    EXPECT_EQ(elements, 4 * 2 * 4 * 96) << format;
    if (format != std::string("nvfp4")) {
      EXPECT_LT(zeros, elements / 8) << format;
    }
  }
}

TEST_F(QuantizedPlan, TwoValuesOfOneElementCannotBeChecked) {
  // The source holds w twice, quantized in blocks along its rows and along its columns.
  const char *const kTwice = R"({version: 1, model: {dtype: bf16, tensors: {w: [64, 64]}, layouts: {
      twice: {params: {a: {holds: w, quantize: mxfp8}, b: {concat: [{permute: [1, 0], of: w}], quantize: mxfp8}}}, once: {params: {w: {holds: w}}}}},
      source: {layout: twice, mesh: {}}, target: {layout: once, mesh: {}}})";
  open(kTwice);
  run();
  EXPECT_THAT(check(*plan_, target_->rankMemories()[0], 5, 1).ambiguity,
              testing::HasSubstr("hold tensor 'w' give two different values for element "));
  EXPECT_THAT(compareSides(1).ambiguity, testing::HasSubstr("hold tensor 'w' give two different values for element "));
  EXPECT_THAT(compareReplicas(*plan_, source_->rankMemories(), 1).skipped, testing::ElementsAre("w"));
}

TEST_F(QuantizedPlan, ReplicasAreCompared) {
  for (const char *format : {"mxfp8", "{format: mxfp8, scale_layout: swizzled}", "block_fp8"})
    for (const char *target : {"", ", quantize: mxfp8"}) {
      open(job(8, quantized(format), target));
      ReplicaResult result = compareReplicas(*plan_, source_->rankMemories(), 2);
      EXPECT_THAT(result.differences, testing::IsEmpty()) << format;
      EXPECT_GE(result.comparedBytes, 2u * 2 * (4 * 96)) << format; // two replicas of two layers on two shards
      EXPECT_THAT(result.skipped, testing::IsEmpty());
      const std::string scale = std::string("l.1.w_scale") + (std::strcmp(format, "block_fp8") == 0 ? "_inv" : "");
      // Swizzled scales are not a tensor of the plan and are compared as bytes; plain scales that are sent are a
      // tensor.
      find(source_->rankMemories()[2], scale)[0] ^= std::byte{1};
      result = compareReplicas(*plan_, source_->rankMemories(), 2);
      ASSERT_EQ(result.differences.size(), 1u) << format << target;
      EXPECT_THAT(result.differences[0],
                  testing::HasSubstr("rank 2 param '" + scale + "' differs from rank 0 param '" + scale + "'"));
    }
}

TEST_F(QuantizedPlan, ViewsAreNeitherListedNorStored) {
  open(job(8, "", quantized("{format: mxfp8, by: sender, scale_layout: swizzled}")));
  for (uint32_t e = 0; e < 2; ++e)
    for (const TensorSpec &spec : specs(*plan_, e, 0))
      EXPECT_THAT(spec.name, testing::Not(testing::HasSubstr("("))) << e;
  EXPECT_EQ(specs(*plan_, 0, 0).size(), 3u);
  EXPECT_EQ(specs(*plan_, 1, 0).size(), 5u);
  reshard_plan *plan = nullptr;
  ASSERT_EQ(reshard_plan_open((folder_ / "p.rplan").c_str(), &plan), RESHARD_OK);
  const reshard_param *params = nullptr;
  size_t count = 0;
  EXPECT_EQ(reshard_plan_params(plan, 1, 0, sizeof(reshard_param), &params, &count), RESHARD_OK);
  EXPECT_EQ(count, 5u);
  reshard_plan_close(plan);
  CompileResult result;
  Diagnostics diagnostics;
  ASSERT_TRUE(compileJob(folder_ / "p.rplan.yaml", {}, result, diagnostics));
  EXPECT_EQ(result.statistics.tensors, 3);
  EXPECT_EQ(result.statistics.params, 4 * 3 + 4 * 5);
  EXPECT_EQ(derivedTensorPatterns(plan_->manifest()), 2u);
}

TEST_F(QuantizedPlan, TheVerifierFollowsViews) {
  auto error = [](const UnpackedPlan &parts) { return proofOf(parts).error; };
  const char *const kWhole =
      R"({version: 1, model: {dtype: bf16, tensors: {w: [64, 64], v: [64, 64]}}, source: {mesh: {}}, target: {mesh: {}, quantize: HOW}})";
  auto compiled = [&](const std::string &how) {
    std::string yaml = kWhole;
    return compiledParts(yaml.replace(yaml.find("HOW"), 3, how));
  };
  auto param = [](UnpackedPlan &parts, uint32_t e, const std::string &name) -> fbs::ParamT & {
    for (auto &each : parts.manifest->endpoints[e]->params)
      if (each->name == name)
        return *each;
    throw std::runtime_error("no param " + name);
  };
  UnpackedPlan parts = compiled("mxfp8");
  ASSERT_EQ(error(parts), "");
  // Read the elements of v from w.
  fbs::SegmentT &segment = *parts.segments[0];
  for (fbs::Operand &operand : segment.operands)
    if (operand.buffer() == 2)
      raw(operand).buffer = 1;
  EXPECT_EQ(error(parts), "target rank 0 param 'v (elements)' byte 0 must be tensor 'v' element 0, but comes from "
                          "tensor 'w' element 0 of rank 0");

  parts = compiled("mxfp8");
  param(parts, 1, "w_scale").derived = false;
  EXPECT_EQ(error(parts), "target rank 0 param 'w_scale' byte 0 is never written");
  parts = compiled("{format: mxfp8, by: sender, scale_layout: swizzled}");
  ASSERT_EQ(error(parts), "");
  *param(parts, 1, "w_scale (plain)").view = *param(parts, 1, "v_scale (plain)").view;
  EXPECT_THAT(error(parts),
              testing::HasSubstr("param 'w_scale' byte 0 is derived from 0 quantized views, expected one"));

  // Swap the codes of two tensors.
  parts = compiled("{format: mxfp8, by: sender}");
  ASSERT_EQ(error(parts), "");
  std::swap(param(parts, 1, "w").parts, param(parts, 1, "v").parts);
  EXPECT_THAT(
      error(parts),
      testing::HasSubstr("must be tensor 'v (codes of mxfp8)' element 0, but comes from tensor 'w (codes of mxfp8)'"));
}

TEST_F(QuantizedPlan, ReportsNameTheQuantizingSide) {
  compile(job(8, "", quantized("mxfp8")), folder_ / "before.rplan");
  compile(job(8, "", quantized("{format: mxfp8, by: sender}")), folder_ / "after.rplan");
  DifferenceOptions difference;
  difference.before = folder_ / "before.rplan";
  difference.after = folder_ / "after.rplan";
  difference.format = "text";
  difference.failOn = "quantized_by_sender > 0 and quantized_on_arrival == 0";
  testing::internal::CaptureStdout();
  EXPECT_TRUE(*report::difference(difference));
  const std::string text = testing::internal::GetCapturedStdout();
  EXPECT_THAT(text, testing::ContainsRegex("quantized_on_arrival +8 +0"));
  EXPECT_THAT(text, testing::ContainsRegex("quantized_by_sender +0 +8"));
  EXPECT_THAT(text, testing::HasSubstr("changed: target l.{layer}.w\nchanged: target l.{layer}.w_scale\n"));

  InspectionOptions inspection;
  inspection.format = "text";
  for (const auto &[file, words] : {std::pair("before.rplan", "8 mxfp8 by the receiver on arrival"),
                                    std::pair("after.rplan", "8 mxfp8 by the sender")}) {
    inspection.plan = folder_ / file;
    testing::internal::CaptureStdout();
    EXPECT_TRUE(inspect(inspection).ok());
    EXPECT_THAT(testing::internal::GetCapturedStdout(), testing::HasSubstr(std::string("quantized: ") + words));
  }
  inspection.param = "l.1.w*";
  testing::internal::CaptureStdout();
  EXPECT_TRUE(inspect(inspection).ok());
  const std::string params = testing::internal::GetCapturedStdout();
  EXPECT_THAT(params, testing::HasSubstr("quantized as mxfp8, codes, by the sender"));
  EXPECT_THAT(params, testing::HasSubstr("quantized as mxfp8, scales, by the sender"));
  EXPECT_THAT(params, testing::Not(testing::HasSubstr("(plain)")));
}

} // namespace
