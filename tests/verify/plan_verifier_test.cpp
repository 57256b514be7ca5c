// SPDX-License-Identifier: Apache-2.0
// The plan verifier accepts compiled plans. For altered plans that the loader accepts, it names the wrong byte and the
// reason.

#include <gmock/gmock.h>

#include "tests/verify/support.h"

#include <ctime>

using namespace reshard;
using namespace reshard::tests;
using namespace reshard::verify;
namespace fbs = reshard::schema;

namespace {

// One rank, only copies: a and b are whole on both sides, but joined on the target and padded from 6 to 8 columns.
const char *const kJoined = R"({version: 1, model: {dtype: fp32, tensors: {a: [2, 6], b: [3, 6]}, layouts: {
    plain: {params: {a: {holds: a}, b: {holds: b}}}, joined: {params: {ab: {concat: [a, b], pad: {1: 8}}}}}},
    source: {layout: plain, mesh: {}}, target: {layout: joined, mesh: {}}})";
// Two ranks to two others: two messages.
const char *const kSent = R"({version: 1, model: {dtype: bf16, tensors: {a: {shape: [4, 8], shard: {0: tp}}, n: [8]}},
    source: {mesh: {tp: 2}}, target: {mesh: {tp: 2}, ranks: 2..3}})";

// Two ranks to three nodes of one rank, which relay received bytes in several messages.
const char *const kRelayed = R"({version: 1, model: {dtype: bf16, tensors: {a: {shape: [4096, 4096], shard: {0: tp}}}},
    source: {mesh: {tp: 2}}, target: {mesh: {tp: 1, dp: 3}, ranks: 2..4}, options: {staging: 16MiB, topology: {ranks_per_node: 1}}})";

std::string error(const UnpackedPlan &parts) { return proofOf(parts).error; }

fbs::Operand moved(const fbs::Operand &o, int64_t bytes) {
  return {static_cast<uint64_t>(static_cast<int64_t>(o.offset()) + bytes), o.buffer(), o.shape()};
}

fbs::Step &stepOf(fbs::SegmentT &segment, fbs::StepKind kind) {
  for (fbs::Step &step : segment.steps)
    if (step.kind() == kind)
      return step;
  throw std::runtime_error("no such step");
}

/// The input operand of `segment` that reads `buffer`.
fbs::Operand &inputFrom(fbs::SegmentT &segment, uint32_t buffer) {
  const fbs::Step &copy = stepOf(segment, fbs::StepKind::copy);
  for (uint32_t i = 0; i < copy.input_count(); ++i)
    if (segment.operands[copy.first_input() + i].buffer() == buffer)
      return segment.operands[copy.first_input() + i];
  throw std::runtime_error("no such operand");
}

TEST(PlanVerifier, GoodPlansAreRight) {
  EXPECT_EQ(proofOf(compiledParts(kJoined)).error, "");
  EXPECT_EQ(proofOf(compiledParts(kJoined)).bytes, 5u * 8 * 4);
  EXPECT_EQ(proofOf(compiledParts(kSent)).error, "");
  EXPECT_EQ(proofOf(compiledParts(kSent)).bytes, 2u * (2 * 8 + 8) * 2);
}

TEST(PlanVerifier, RefusesASecondWriteOfRightBytes) {
  UnpackedPlan parts = compiledParts(kJoined);
  fbs::SegmentT &segment = *parts.segments[0];
  const fbs::Step s = stepOf(segment, fbs::StepKind::copy);
  const auto first = static_cast<uint32_t>(segment.operands.size());
  for (const uint32_t begin : {s.first_input(), s.first_output()})
    for (uint32_t i = 0; i < s.output_count(); ++i)
      segment.operands.push_back(fbs::Operand(segment.operands[begin + i]));
  segment.steps.push_back(s);
  raw(segment.steps.back()).firstInput = first;
  raw(segment.steps.back()).firstOutput = first + s.input_count();
  EXPECT_EQ(error(parts), "target rank 0 param 'ab' byte 0 is written twice");
}

TEST(PlanVerifier, RefusesBytesOfAnotherDtype) {
  UnpackedPlan parts =
      compiledParts("{version: 1, model: {tensors: {a: {shape: [5], dtype: fp32}, b: {shape: [5], dtype: "
                    "i32}}}, source: {mesh: {}}, target: {mesh: {}}}");
  fbs::Operand &input = inputFrom(*parts.segments[0], 1); // 1 and 2 are the source's a and b
  raw(input).buffer = 2;
  EXPECT_EQ(error(parts), "target rank 0 param 'a' byte 0 is fp32, but comes from i32");
}

TEST(PlanVerifier, NamesAWrongElement) {
  // Buffers: 0 the arena, 1 a, 2 b, 3 ab. First a is replaced by b; then b is read at a wrong offset.
  UnpackedPlan parts = compiledParts(kJoined);
  fbs::SegmentT &segment = *parts.segments[0];
  fbs::Operand &input = inputFrom(segment, 2);
  fbs::Operand &first = inputFrom(segment, 1);
  const fbs::Operand good = first;
  raw(first).buffer = 2;
  EXPECT_EQ(
      error(parts),
      "target rank 0 param 'ab' byte 0 must be tensor 'a' element 0, but comes from tensor 'b' element 0 of rank 0");
  first = good;
  input = moved(input, 2);
  EXPECT_NE(error(parts), "");
}

// Three layers of the same form, on one rank: as they are, and stacked on the target.
TEST(PlanVerifier, LayersOfOneFormAreComparedByTheirTensors) {
  for (const char *target : {R"("m.{layer}": {holds: "l.{layer}.w"})", R"(m: {holds: "l.{layer}.w", stack: layer})"}) {
    UnpackedPlan parts =
        compiledParts(R"({version: 1, model: {dtype: fp32, index: {layer: 3}, tensors: {"l.{layer}.w": [7, 6]},
        layouts: {plain: {params: same}, other: {params: {)" +
                      std::string(target) + R"(}}}}, source: {layout: plain, mesh: {}},
        target: {layout: other, mesh: {}}})");
    EXPECT_EQ(proofOf(parts).error, "");
    EXPECT_EQ(proofOf(parts).bytes, 3u * 7 * 6 * 4);
    auto &list = parts.manifest->endpoints[1]->params[0]->parts;
    list.push_back(std::make_unique<fbs::PartT>(*list[0])); // parts that overlap and agree, in each layer
    EXPECT_EQ(error(parts), "");
    list.pop_back();
    // The source's buffers of layers 1 and 2 are exchanged.
    fbs::EndpointT &source = *parts.manifest->endpoints[0];
    fbs::ShardingT &numbers = *source.shardings[source.params[0]->instances[0]];
    numbers.blocks = {{0, 0, 1, 1, 0, 0}, {1, 2, 1, 1, 0, 0}, {2, 1, 1, 1, 0, 0}};
    numbers.first = {0, 3};
    EXPECT_THAT(error(parts), testing::HasSubstr(" must be tensor 'l.1.w' element 0, but comes from tensor 'l.2.w' "
                                                 "element 0 of rank 0"));
  }
}

// Four shards to eight replicas of two ranks: 40 tensors, of which each rank receives 160 pieces.
std::string shardsToReplicas() {
  return "{version: 1, model: {dtype: bf16, tensors: {" + tensorsOfRows(40, 64, 8, 32) +
         "}, layouts: {fsdp: {params: same, shard: {'*': {0: fsdp}}}, tp: {params: same, shard: {'*': {1: tp}}}}},"
         " source: {layout: fsdp, mesh: {fsdp: 4}}, target: {layout: tp, mesh: {tp: 2, dp: 8}, ranks: 4..19}}";
}

TEST(PlanVerifier, ReplicasAreProvenByTheirDifferences) {
  const VerifyResult good = proofOf(compiledParts(shardsToReplicas()));
  EXPECT_EQ(good.error, "");
  EXPECT_EQ(good.bytes, 16u * (40 * 64 + 8 * 780) * 16 * 2);
  EXPECT_EQ(good.replicas, 4u + 14u - 1u)
      << "the ranks of the source, which have no targets, and all replicas but one of each kind";
}

TEST(PlanVerifier, ReplicasWhoseMessagesEndElsewhere) {
  const UnpackedPlan parts = compiledParts("{version: 1, model: " RESHARD_SOURCE_DIR "/examples/models/qwen3-0.6b.yaml,"
                                           " source: {layout: fsdp2, mesh: {fsdp: 32}},"
                                           " target: {layout: vllm, mesh: {tp: 4, dp: 8}, ranks: 32..63}}");
  const VerifyResult result = proofOf(parts);
  EXPECT_EQ(result.error, "");
  EXPECT_EQ(result.bytes, parts.manifest->bytes_target);
  EXPECT_GT(result.moves, parts.manifest->transfers) << "no transfer is cut: the test needs another job";
  EXPECT_EQ(result.replicas, 31u + 28u);
}

TEST(PlanVerifier, AWrongReplicaIsFound) {
  const size_t rank = 18; // the last replica of tp rank 0
  auto outputs = [&](UnpackedPlan &parts, auto visit) {
    fbs::SegmentT &segment = *parts.segments[rank];
    for (const fbs::Step &step : segment.steps)
      for (uint32_t i = 0; step.kind() == fbs::StepKind::recv && i < step.output_count(); ++i)
        visit(segment.operands[step.first_output() + i]);
  };
  { // one output is written twice, another one never
    UnpackedPlan parts = compiledParts(shardsToReplicas());
    fbs::Operand first;
    int count = 0;
    outputs(parts, [&](fbs::Operand &output) {
      if (count == 0)
        first = output;
      count += count == 0 || (count == 1 && output.buffer() == first.buffer() && output.shape() == first.shape());
      if (count == 2) {
        output = first;
        ++count;
      }
    });
    ASSERT_EQ(count, 3);
    EXPECT_THAT(error(parts), testing::HasSubstr("target rank 18 param 't0' byte"));
  }
  { // two outputs of the same size are exchanged
    UnpackedPlan parts = compiledParts(shardsToReplicas());
    std::vector<fbs::Operand *> all;
    outputs(parts, [&](fbs::Operand &output) { all.push_back(&output); });
    bool exchanged = false;
    for (size_t i = 0; i < all.size() && !exchanged; ++i)
      for (size_t k = i + 1; k < all.size() && !exchanged; ++k)
        if (all[i]->buffer() == all[k]->buffer() && all[i]->shape() == all[k]->shape()) {
          std::swap(*all[i], *all[k]);
          exchanged = true;
        }
    ASSERT_TRUE(exchanged);
    EXPECT_THAT(error(parts), testing::HasSubstr(" must be tensor "));
  }
}

TEST(PlanVerifier, NamesMissingAndRepeatedBytes) {
  UnpackedPlan parts = compiledParts(kJoined);
  fbs::SegmentT &segment = *parts.segments[0];
  const fbs::Step copy = stepOf(segment, fbs::StepKind::copy);
  // Move the output at offset 0 by 4 bytes.
  for (uint32_t i = 0; i < copy.output_count(); ++i)
    if (fbs::Operand &out = segment.operands[copy.first_output() + i]; out.offset() == 0)
      out = moved(out, 4);
  EXPECT_EQ(error(parts), "target rank 0 param 'ab' byte 0 is never written");

  parts = compiledParts(kJoined);
  for (uint32_t i = 0; i < copy.output_count(); ++i)
    if (fbs::Operand &out = parts.segments[0]->operands[copy.first_output() + i]; out.offset() != 0)
      out = fbs::Operand(0, out.buffer(), out.shape());
  EXPECT_EQ(error(parts), "target rank 0 param 'ab' byte 0 is written twice");
}

TEST(PlanVerifier, RelayedParamsMustHaveArrived) {
  UnpackedPlan parts = compiledParts(kRelayed);
  EXPECT_EQ(error(parts), "");
  int altered = 0;
  for (size_t rank = 2; rank < parts.segments.size(); ++rank) {
    fbs::SegmentT &segment = *parts.segments[rank];
    for (const fbs::Step &step : segment.steps) {
      if (step.kind() != fbs::StepKind::send)
        continue;
      // Make it wait for the first receive instead, which writes other bytes, unless it relays those.
      for (uint32_t i = 0; i < step.after_count(); ++i) {
        uint32_t &before = segment.after[step.first_after() + i];
        const uint32_t right = before;
        if (segment.steps[right].kind() != fbs::StepKind::recv || right == 0)
          continue;
        before = 0;
        EXPECT_THAT(error(parts), testing::HasSubstr("but no step that the send waits for writes it"))
            << "rank " << rank;
        before = right;
        ++altered;
      }
    }
  }
  EXPECT_GE(altered, 2);
}

TEST(PlanVerifier, CopiesMustReadTheSource) {
  // A copy of the target onto itself writes each byte once, from the right position, but nothing has written that
  // position.
  UnpackedPlan parts = compiledParts(kJoined);
  fbs::SegmentT &segment = *parts.segments[0];
  const fbs::Step copy = stepOf(segment, fbs::StepKind::copy);
  for (uint32_t i = 0; i < copy.input_count(); ++i) {
    const fbs::Operand &out = segment.operands[copy.first_output() + i];
    segment.operands[copy.first_input() + i] = fbs::Operand(out.offset(), out.buffer(), out.shape());
  }
  EXPECT_THAT(error(parts),
              testing::HasSubstr(
                  "step 1 operand 1: reads buffer 3, expected one of the source, or of a target rank in a send"));

  for (uint32_t i = 0; i < copy.input_count(); ++i)
    segment.operands[copy.first_input() + i] = fbs::Operand(0, 0, segment.operands[copy.first_output() + i].shape());
  parts.manifest->arena_bytes = segment.arena_bytes = 4096;
  EXPECT_THAT(error(parts),
              testing::HasSubstr("step 1 operand 1: reads the arena, expected the step to wait for its writers"));

  parts = compiledParts(kJoined);
  parts.manifest->arena_bytes = parts.segments[0]->arena_bytes = 4096;
  fbs::Operand &output = parts.segments[0]->operands[copy.first_output()];
  output = fbs::Operand(0, 0, output.shape());
  EXPECT_THAT(
      error(parts),
      testing::HasSubstr(
          "writes to the arena, expected only receives to do so on a rank that quantizes nothing in the arena"));
}

// One rank of a node of four holds all elements, and the other three relay most of them in several phases, which reuse
// the same arena bytes.
TEST(PlanVerifier, RelayedArenaBytesMustHaveArrived) {
  UnpackedPlan parts = compiledParts(
      R"({version: 1, model: {dtype: bf16, tensors: {a: {shape: [96, 64], shard: {1: tp}}, b: {shape: [4, 50], shard: {0: tp}}}}, source: {mesh: {tp: 1}},
      target: {mesh: {tp: 4}, ranks: 4..7}, options: {staging: 4KiB, topology: {ranks_per_node: 4, nics: {per_node: 4, rate: 1MB/s, latency: 1ns}}}})");
  ASSERT_EQ(error(parts), "");
  int waits = 0, shifted = 0, again = 0;
  for (size_t rank = 1; rank < 4; ++rank) {
    fbs::SegmentT &segment = *parts.segments[rank];
    auto relays = [&](const fbs::Step &step) {
      return step.kind() == fbs::StepKind::send && segment.operands[step.first_input()].buffer() == 0;
    };
    for (uint32_t s = 0; s < segment.steps.size(); ++s) {
      const fbs::Step step = segment.steps[s];
      for (uint32_t i = 0; i < step.after_count(); ++i) {
        // Make it wait for another step.
        uint32_t &before = segment.after[step.first_after() + i];
        const fbs::StepKind kind = segment.steps[before].kind();
        if (kind == step.kind() || before == 0)
          continue;
        again += kind == fbs::StepKind::send;
        const uint32_t right = std::exchange(before, kind == fbs::StepKind::send ? 0 : before - 1);
        EXPECT_NE(error(parts), "") << "rank " << rank << " step " << s;
        before = right;
        ++waits;
      }
      for (uint32_t i = 0; i < step.input_count() && relays(step); ++i) {
        // Make it send other bytes of the arena.
        fbs::Operand &operand = segment.operands[step.first_input() + i];
        const fbs::Operand right = std::exchange(operand, moved(operand, operand.offset() >= 64 ? -64 : 64));
        EXPECT_NE(error(parts), "") << "rank " << rank << " step " << s;
        operand = right;
        ++shifted;
      }
    }
  }
  EXPECT_GE(waits, 20);
  EXPECT_GE(shifted, 10);
  EXPECT_GE(again, 3);
}

// A relay receives layers 0 and 1 of experts 0 and 2 in one output. Each layer comes from a buffer of its own, so that
// its bytes are not contiguous in the arena, but the output is.
TEST(PlanVerifier, RelayedOutputsMayComeFromSeveralBuffers) {
  const VerifyResult result = proofOf(compiledParts(
      R"({version: 1, model: {dtype: fp32, index: {layer: 3, expert: 3}, tensors: {"l.{layer}.e.{expert}.w": [7, 6]}, layouts: {
        s: {params: {"e.{expert}": {holds: "l.{layer}.e.{expert}.w", stack: layer}}}, t: {params: {"l.{layer}.{expert}": {holds: "l.{layer}.e.{expert}.w"}}}}},
        source: {layout: s, mesh: {pp: 2}, place: {layer: {axis: pp, sizes: [2, 1]}}},
        target: {layout: t, mesh: {x: 6, pp: 2}, place: {expert: {axis: pp, cyclic: 2}}, ranks: 4..15},
        options: {topology: {ranks_per_node: 4, nics: {per_node: 4, rate: 1MB/s, latency: 1ns}}}})"));
  EXPECT_EQ(result.error, "");
  EXPECT_EQ(result.bytes, 9072u);
}

TEST(PlanVerifier, PaddingIsZerosAndNothingElseIs) {
  UnpackedPlan parts = compiledParts(kJoined);
  fbs::SegmentT &segment = *parts.segments[0];
  fbs::Operand &filled = segment.operands[stepOf(segment, fbs::StepKind::fill).first_output()];
  fbs::Operand good = filled;
  filled = moved(filled, -4);
  EXPECT_NE(error(parts), "");
  filled = good;
  ASSERT_EQ(error(parts), "");
  // Swap the outputs of the fill and the copy: zeros overwrite a tensor.
  fbs::Operand &copied = segment.operands[stepOf(segment, fbs::StepKind::copy).first_output()];
  good = copied;
  copied = fbs::Operand(filled.offset(), filled.buffer(), copied.shape());
  EXPECT_NE(error(parts), "");
}

TEST(PlanVerifier, DtypesMustAgree) {
  UnpackedPlan parts = compiledParts(kJoined); // fp32 and i32 have 4 bytes
  for (auto &param : parts.manifest->endpoints[1]->params)
    param->dtype = fbs::DType::i32;
  EXPECT_THAT(error(parts),
              testing::EndsWith("endpoint 'target' param 'ab' has dtype i32, expected fp32 as in tensor 'a'"));
}

TEST(PlanVerifier, LayoutsWithHolesOrContradictionsProveNothing) {
  UnpackedPlan parts = compiledParts(kJoined);
  auto &list = parts.manifest->endpoints[1]->params[0]->parts;
  ASSERT_GE(list.size(), 3u); // a, b, padding
  const auto pattern = list[1]->pattern;
  list[1]->pattern = -1;
  EXPECT_NE(error(parts), "");
  list[1]->pattern = pattern;
  ASSERT_EQ(error(parts), "");
  list.push_back(std::make_unique<fbs::PartT>(*list[0])); // a duplicate that agrees
  EXPECT_EQ(error(parts), "");
  list.pop_back();
  list.erase(list.begin());
  EXPECT_EQ(error(parts), "target rank 0 param 'ab' byte 0 is covered by no part of its layout");

  // Two tensor dimensions in one dimension of the param: positions would exceed it.
  parts = compiledParts(kJoined);
  auto &first = parts.manifest->endpoints[1]->params[0]->parts[0]->dimensions;
  first[1] = fbs::PartDimension(first[1].sharding(), first[0].param());
  EXPECT_NE(error(parts), "");
}

TEST(PlanVerifier, AbsentVectorsAreEmpty) {
  // After repacking, a scalar's part has no dimensions vector and an idle rank has no vectors at all.
  const UnpackedPlan parts = compiledParts(
      R"({version: 1, world: 3, model: {dtype: fp32, tensors: {s: []}}, source: {mesh: {}}, target: {mesh: {}, ranks: [1]}})");
  EXPECT_EQ(proofOf(parts).error, "");
  EXPECT_EQ(proofOf(parts).bytes, 4u);
}

// Columns of 64 tensors of 7168 rows, stacked: 29 million rows, in 4096 moves. Measured in CPU time.
const char *const kColumns =
    R"({version: 1, model: {dtype: fp8_e4m3, index: {x: 64}, tensors: {"t.{x}": [7168, 2048]}, layouts: {
    whole: {place: {x: ep}, params: {"t.{x}": {holds: "t.{x}"}}}, columns: {params: {w: {stack: x, holds: "t.{x}", shard: {2: tp}}}}}},
    source: {layout: whole, mesh: {ep: 64}}, target: {layout: columns, mesh: {tp: 8, dp: 8}, ranks: 0..63}})";

TEST(PlanVerifier, ColumnsAreProvenAsColumns) {
  const UnpackedPlan parts = compiledParts(kColumns);
  const std::clock_t begin = std::clock();
  const VerifyResult result = proofOf(parts);
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 1.0);
  EXPECT_EQ(result.error, "");
  EXPECT_EQ(result.moves, 64u * 64);
  EXPECT_EQ(result.bytes, uint64_t{64} * 7168 * 2048 * 8);
}

TEST(PlanVerifier, NamesAMisplacedColumn) {
  UnpackedPlan parts = compiledParts(
      R"({version: 1, model: {dtype: fp32, tensors: {t: [100, 8]}, layouts: {whole: {params: {t: {holds: t}}}, columns: {params: {t: {holds: t, shard: {1: tp}}}}}},
      source: {layout: columns, mesh: {tp: 2}}, target: {layout: whole, mesh: {}, ranks: [2]}})");
  ASSERT_EQ(error(parts), "");
  // Rank 2 receives rows of 16 bytes from each source rank, with a stride of 32 bytes.
  fbs::SegmentT &to = *parts.segments[2];
  fbs::Loop &loop = to.loops.back();
  const fbs::Loop good = loop;
  ASSERT_EQ(good.stride(), 32);
  ASSERT_EQ(good.count(), 100u);
  loop = fbs::Loop(100, 16, 0);
  EXPECT_EQ(error(parts), "target rank 2 param 't' byte 16 is written twice");
  loop = good;
  for (fbs::Operand &operand : to.operands)
    if (operand.offset() == 16)
      operand = moved(operand, -16);
  EXPECT_EQ(error(parts), "target rank 2 param 't' byte 0 is written twice");
  parts = compiledParts(
      R"({version: 1, model: {dtype: fp32, tensors: {t: [100, 8]}, layouts: {whole: {params: {t: {holds: t}}}, columns: {params: {t: {holds: t, shard: {1: tp}}}}}},
      source: {layout: whole, mesh: {}}, target: {layout: columns, mesh: {tp: 2}, ranks: 1..2}})");
  ASSERT_EQ(error(parts), "");
  fbs::SegmentT &sender = *parts.segments[0];
  ASSERT_FALSE(sender.loops.empty());
  sender.loops.back() = fbs::Loop(100, 28, 0);
  EXPECT_EQ(
      error(parts),
      "target rank 1 param 't' byte 16 must be tensor 't' element 8, but comes from tensor 't' element 7 of rank 0");
}

TEST(PlanVerifier, MessagesMustPair) {
  UnpackedPlan parts = compiledParts(kSent);
  test::RawStep &send = raw(stepOf(*parts.segments[0], fbs::StepKind::send));
  ASSERT_EQ(send.peer, 2u);
  send.peer = 3;
  EXPECT_EQ(error(parts), "message 0 from rank 0 to rank 2: found peers 3 and 0, expected each other");
  send.peer = 2;
  send.message = 1 - send.message;
  EXPECT_NE(error(parts).find("is sent twice"), std::string::npos) << error(parts);
}

TEST(PlanVerifier, FilesWrittenBySeveralRanksAreVerified) {
  const char *yaml = R"({version: 1, model: {dtype: bf16, tensors: {a: {shape: [4, 8], shard: {0: tp}}, n: [8]}},
      source: {mesh: {tp: 2}}, target: {storage: out}})";
  UnpackedPlan parts = compiledParts(yaml);
  EXPECT_EQ(proofOf(parts).error, "");
  EXPECT_EQ(proofOf(parts).bytes, (4u * 8 + 8) * 2);
  fbs::SegmentT &segment = *parts.segments[1];
  fbs::Operand &out = segment.operands[stepOf(segment, fbs::StepKind::copy).first_output()];
  out = moved(out, -2);
  EXPECT_NE(error(parts), "");
}

} // namespace
