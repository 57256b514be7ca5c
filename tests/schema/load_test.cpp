// SPDX-License-Identifier: Apache-2.0
// The loader refuses a segment or manifest with correct digests and a valid FlatBuffer in which one value is wrong. The
// error says what was found and what was expected.

#include "tests/schema/support.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <set>

using namespace reshard;
using namespace reshard::schema;
using namespace reshard::test;

namespace {

struct Violation {
  const char *what;
  std::function<void(Parts &)> alter;
  const char *message;
};

/// For each violation: alters the tiny plan, writes it, loads it, and compares the error.
void expectRefusal(const std::vector<Violation> &violations, const std::string &prefix) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  for (const Violation &violation : violations) {
    Parts parts = tinyParts();
    violation.alter(parts);
    pack(parts, path);
    EXPECT_EQ(readAll(path), prefix + violation.message) << violation.what;
  }
}

constexpr uint64_t kHuge = uint64_t{1} << 62;
constexpr const char *kOutOfRange = "shape 0: row bytes, loop counts or their product are out of range, expected 1 to "
                                    "1152921504606846976; strides and extents at most that in size";
constexpr const char *kNotLocal = "step 1 is local but has a peer, a message, staging or chunks";

} // namespace

TEST(Load, AcceptsTheTinyPlan) {
  const TemporaryFolder folder;
  writeTiny(folder / "plan");
  EXPECT_EQ(readAll(folder / "plan"), "");
  pack(unpack(folder / "plan"), folder / "again");
  EXPECT_EQ(readAll(folder / "again"), "");
}

TEST(Load, NotAFlatBuffer) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  const Parts parts = tinyParts();
  std::vector<std::string> segments = serialized(parts.segments);
  const std::string manifest = serialized(parts.manifest);

  const std::string zeros(100, '\0'), text = "this is no FlatBuffer at all, and long enough to look like one";
  for (const std::string &bad : {std::string("x"), manifest.substr(0, 11), zeros, text, manifest + "\1", segments[0]}) {
    writeContainer(path, bad, segments);
    EXPECT_EQ(readAll(path), "damaged: the manifest is not a valid FlatBuffer") << bad.size();
  }
  for (const std::string &bad :
       {std::string("x"), segments[2].substr(0, 11), zeros, text, segments[2] + "\1", manifest}) {
    segments[1] = bad;
    writeContainer(path, manifest, segments);
    EXPECT_EQ(readAll(path), "the segment of rank 1 is not a valid FlatBuffer") << bad.size();
  }
}

// Rank 0 sends operand 0 to rank 1, then operand 1 to rank 2.
TEST(Load, SharedInputs) {
  auto refusal = [&](auto change) {
    const TemporaryFolder folder;
    Parts parts = tinyParts();
    parts.segments[0].operands.pop_back();
    parts.step(0, 1).firstInput = 0;
    parts.step(0, 1).firstOutput = 1;
    change(parts);
    pack(parts, folder / "plan");
    std::unique_ptr<Plan> plan;
    std::shared_ptr<const schema::Segment> segment;
    EXPECT_EQ(Plan::open(folder / "plan", plan).message(), "");
    const std::string error = plan->segment(0, segment).message();
    return error.substr(std::min(error.size(), error.find("inconsistent: ")));
  };
  EXPECT_EQ(refusal([](Parts &) {}), "");
  EXPECT_EQ(
      refusal([](Parts &p) { p.step(0, 1).outputCount = 1; }),
      "inconsistent: step 1 has the inputs of an earlier send, and 1 outputs at operand 1, expected none after its "
      "inputs");
  EXPECT_EQ(
      refusal([](Parts &p) { p.step(0, 1).firstOutput = 0; }),
      "inconsistent: step 1 has the inputs of an earlier send, and 0 outputs at operand 0, expected none after its "
      "inputs");
  EXPECT_EQ(refusal([](Parts &p) { p.step(0, 1).inputCount = 2; }),
            "inconsistent: step 1 found its inputs at operand 0 and its outputs at 1, expected them from 1 within 1");
  EXPECT_EQ(refusal([](Parts &p) { p.step(0, 1).inputCount = 0; }),
            "inconsistent: step 1 found its inputs at operand 0 and its outputs at 1, expected them from 1 within 1");
  EXPECT_EQ(refusal([](Parts &p) { p.step(0, 1).kind = uint8_t(schema::StepKind::fill); }),
            "inconsistent: step 1 found its inputs at operand 0 and its outputs at 1, expected them from 1 within 1");
}

// Rank 1 has steps of kinds fill, copy, recv and send.
//   operands  0: fill; 1, 2: copy; 3: recv; 4: send
//   buffers   1, 2: source, 24 bytes; 3, 4: target, 32 bytes
//   shapes    0: padding, row 2, loops {2: +1 buffer, 4: 8}; 1: source rows, row 6, loops {2: +1 buffer, 2: 12};
//             2: target rows, row 6, loops {2: +1 buffer, 2: 8}
TEST(Load, SegmentRefusals) {
  expectRefusal(
      {
          {"rank", [](Parts &p) { p.segments[1].rank = 2; }, "found rank 2, expected 1"},
          {"arena over the manifest's", [](Parts &p) { p.segments[1].arena_bytes = 49; },
           "found an arena of 49 bytes, expected at most the 48 of the manifest"},
          {"arena without room for a transform",
           [](Parts &p) { p.manifest.endpoints[1]->params[0]->transform = "pack"; },
           "found an arena of 24 bytes, expected 128 or more for staged buffers"},
          {"arena over the limit", [](Parts &p) { p.manifest.arena_bytes = p.segments[1].arena_bytes = 65; },
           "found an arena of 65 bytes, expected at most the staging limit of 64"},
          {"arena over any limit",
           [](Parts &p) {
             p.segments[1].arena_bytes = kHuge;
             p.manifest.staging_limit = 0;
           },
           "found an arena of 4611686018427387904 bytes, expected at most 1152921504606846976"},

          {"a missing buffer range", [](Parts &p) { p.segments[1].buffers.pop_back(); },
           "found 1 buffer ranges, expected one more for param 'w.{layer}' of endpoint 1"},
          {"one buffer range too many", [](Parts &p) { p.segments[1].buffers.push_back(p.segments[1].buffers[1]); },
           "found 3 buffer ranges, expected 2 as in the manifest"},
          {"buffers of another endpoint", [](Parts &p) { p.buffers(1, 0).endpoint = 1; },
           "buffer range 0: found endpoint 1, expected 0 (param 'weight{layer}')"},
          {"buffers of another mesh rank", [](Parts &p) { p.buffers(1, 0).meshRank = 0; },
           "buffer range 0: found mesh rank 0, expected 1 (param 'weight{layer}')"},
          {"buffers of another param", [](Parts &p) { p.buffers(1, 1).param = 1; },
           "buffer range 1: found param 1, expected 0 (param 'w.{layer}')"},
          {"buffer numbers with a gap", [](Parts &p) { p.buffers(1, 1).first = 4; },
           "buffer range 1: found first buffer 4, expected 3 (param 'w.{layer}')"},
          {"another count", [](Parts &p) { p.buffers(1, 0).count = 3; },
           "buffer range 0: found count 3, expected 2 (param 'weight{layer}')"},
          {"another size", [](Parts &p) { p.buffers(1, 1).bytes = 33; },
           "buffer range 1: found bytes 33, expected 32 (param 'w.{layer}')"},
          {"reserved", [](Parts &p) { p.buffers(1, 1).reserved = 1; },
           "buffer range 1: found reserved 1, expected 0 (param 'w.{layer}')"},

          {"a shape's loops overlap", [](Parts &p) { p.shape(1, 1).firstLoop = 1; },
           "shape 1: found loops [1, 3), expected them from 2 within 6"},
          {"a shape's loops end outside", [](Parts &p) { p.shape(1, 2).loopCount = 3; },
           "shape 2: found loops [4, 7), expected them from 4 within 6"},
          {"a shape's loops end far outside", [](Parts &p) { p.shape(1, 2).loopCount = UINT32_MAX; },
           "shape 2: found loops [4, 4294967299), expected them from 4 within 6"},
          {"a loop without a shape", [](Parts &p) { p.segments[1].loops.push_back(p.segments[1].loops[0]); },
           "found 7 loops, expected the 6 of the shapes"},
          {"too many loops",
           [](Parts &p) {
             p.segments[1].loops.insert(p.segments[1].loops.end(), 15, p.segments[1].loops[0]);
             p.shape(1, 2).loopCount = 17;
           },
           "shape 2: found 17 loops, expected at most 16"},
          {"a row of no bytes", [](Parts &p) { p.shape(1, 0).rowBytes = 0; }, kOutOfRange},
          {"a row of too many bytes", [](Parts &p) { p.shape(1, 0).rowBytes = kHuge; }, kOutOfRange},
          {"a loop of no steps", [](Parts &p) { p.loop(1, 1).count = 0; }, kOutOfRange},
          {"a loop of too many steps", [](Parts &p) { p.loop(1, 1).count = UINT64_MAX; }, kOutOfRange},
          {"loops that multiply to too much",
           [](Parts &p) { p.loop(1, 0).count = p.loop(1, 1).count = uint64_t{1} << 31; }, kOutOfRange},
          {"a stride that overflows", [](Parts &p) { p.loop(1, 1).stride = INT64_MAX; }, kOutOfRange},
          {"a stride that overflows down", [](Parts &p) { p.loop(1, 1).stride = INT64_MIN; }, kOutOfRange},
          {"a buffer step that overflows", [](Parts &p) { p.loop(1, 0).bufferStep = INT64_MAX; }, kOutOfRange},

          {"a round too late", [](Parts &p) { p.step(1, 3).round = 2; },
           "step 3 found round 2, expected 0 or later and before 2"},
          {"rounds that descend", [](Parts &p) { p.step(1, 1).round = 1; },
           "step 2 found round 0, expected 1 or later and before 2"},
          {"operands that overlap", [](Parts &p) { p.step(1, 1).firstInput = 0; },
           "step 1 found its inputs at operand 0 and its outputs at 2, expected them from 1 within 5"},
          {"outputs before inputs", [](Parts &p) { p.step(1, 1).firstOutput = 1; },
           "step 1 found its inputs at operand 1 and its outputs at 1, expected them from 1 within 5"},
          {"operands that end outside", [](Parts &p) { p.step(1, 3).inputCount = UINT32_MAX; },
           "step 3 found its inputs at operand 4 and its outputs at 5, expected them from 4 within 5"},
          {"outputs that end outside", [](Parts &p) { p.step(1, 1).outputCount = UINT32_MAX; },
           "step 1 found its inputs at operand 1 and its outputs at 2, expected them from 1 within 5"},
          {"a send with the operand of a fill", [](Parts &p) { p.step(1, 3).firstInput = 0; },
           "step 3 found its inputs at operand 0 and its outputs at 5, expected them from 4 within 5"},
          {"an operand without a step", [](Parts &p) { p.segments[1].operands.push_back(p.segments[1].operands[0]); },
           "found 6 operands and 2 entries of 'after', expected 5 and 2 as in the steps"},
          {"'after' that ends outside", [](Parts &p) { p.step(1, 3).afterCount = 3; },
           "step 3 found its 'after' list at 0, expected it at 0 within 2"},
          {"'after' that begins elsewhere", [](Parts &p) { p.step(1, 3).firstAfter = 1; },
           "step 3 found its 'after' list at 1, expected it at 0 within 2"},
          {"'after' itself", [](Parts &p) { p.segments[1].after[1] = 3; },
           "step 3 waits for step 3, expected an earlier one"},
          {"an 'after' without a step", [](Parts &p) { p.segments[1].after.push_back(0); },
           "found 5 operands and 3 entries of 'after', expected 5 and 2 as in the steps"},

          {"reduce", [](Parts &p) { p.step(1, 1).kind = 4; }, "step 1 is a reduce with outputs, expected none"},
          {"an unknown kind", [](Parts &p) { p.step(1, 1).kind = 5; },
           "step 1 is of kind 5, which this version does not support"},
          {"the last kind", [](Parts &p) { p.step(1, 1).kind = 255; },
           "step 1 is of kind 255, which this version does not support"},
          {"no kind", [](Parts &p) { p.step(1, 1).kind = 200; },
           "step 1 is of kind 200, which this version does not support"},
          {"no dependency level", [](Parts &p) { p.step(1, 3).level = 0; },
           "step 3 has dependency level 0, expected more than the 0 of step 1, for which it waits"},
          {"a dependency level that does not grow", [](Parts &p) { p.step(1, 2).level = 1; },
           "step 3 has dependency level 1, expected more than the 1 of step 2, for which it waits"},
          {"the greatest dependency level twice",
           [](Parts &p) { p.step(1, 2).level = p.step(1, 3).level = UINT16_MAX; },
           "step 3 has dependency level 65535, expected more than the 65535 of step 2, for which it waits"},
          {"a copy in chunks", [](Parts &p) { p.step(1, 1).chunk = 256; }, kNotLocal},
          {"a chunk of any size", [](Parts &p) { p.step(1, 2).chunk = 12; },
           "step 2 has chunks of 12 bytes, expected a multiple of 256 below its 24"},
          {"a chunk that is larger than the message", [](Parts &p) { p.step(1, 2).chunk = 256; },
           "step 2 has chunks of 256 bytes, expected a multiple of 256 below its 24"},
          {"a slot of one chunk", [](Parts &p) { p.step(1, 2).slot = 1; },
           "step 2 begins in slot 1, expected 0, or 1 of a staged message of several chunks"},
          {"a copy with more inputs",
           [](Parts &p) {
             p.step(1, 1).inputCount = 2;
             p.step(1, 1).outputCount = 0;
             p.step(1, 1).firstOutput = 3;
           },
           "step 1 copies 2 inputs to 0 outputs, expected as many outputs as inputs"},
          {"a send with outputs", [](Parts &p) { p.step(1, 1).kind = 1; },
           "step 1 is a send with outputs, expected none"},
          {"a receive with inputs", [](Parts &p) { p.step(1, 1).kind = 2; },
           "step 1 is a receive with inputs, expected none"},
          {"a fill with inputs", [](Parts &p) { p.step(1, 1).kind = 3; },
           "step 1 is a fill with inputs, expected none"},
          {"nothing to do",
           [](Parts &p) {
             p.segments[1].operands.pop_back();
             p.step(1, 3).inputCount = 0;
             p.step(1, 3).firstOutput = 4;
           },
           "step 3 has no operands"},
          {"other bytes in a copy", [](Parts &p) { p.step(1, 1).bytes = 23; },
           "step 1 has operands of 24 bytes, expected 23"},
          {"other bytes in a send", [](Parts &p) { p.step(1, 3).bytes = kHuge; },
           "step 3 has operands of 24 bytes, expected 4611686018427387904"},
          {"other bytes in a receive", [](Parts &p) { p.step(1, 2).bytes = 0; },
           "step 2 has operands of 24 bytes, expected 0"},
          {"other bytes in a fill", [](Parts &p) { p.step(1, 0).bytes = 17; },
           "step 0 has operands of 16 bytes, expected 17"},

          {"no such shape", [](Parts &p) { p.operand(1, 2).shape = 3; },
           "step 1 operand 2: found shape 3, expected one below 3"},
          {"no such buffer", [](Parts &p) { p.operand(1, 2).buffer = 5; },
           "step 1 operand 2: found buffer 5, expected one below 5"},
          {"far from any buffer", [](Parts &p) { p.operand(1, 2).buffer = UINT32_MAX; },
           "step 1 operand 2: found buffer 4294967295, expected one below 5"},
          {"over the last buffer", [](Parts &p) { p.operand(1, 2).buffer = 4; },
           "step 1 operand 2: found buffers [4, 6), expected them in [3, 5)"},
          {"from the source into the target", [](Parts &p) { p.operand(1, 1).buffer = 2; },
           "step 1 operand 1: found buffers [2, 4), expected them in [1, 3)"},
          {"below the first buffer", [](Parts &p) { p.loop(1, 2).bufferStep = -1; },
           "step 1 operand 1: found buffers [0, 2), expected them in [1, 3)"},
          {"beyond the arena", [](Parts &p) { p.operand(1, 2).buffer = 0; },
           "step 1 operand 2: found buffers [0, 2), expected them in [0, 1)"},
          {"before the buffer", [](Parts &p) { p.loop(1, 3).stride = -12; },
           "step 1 operand 1: found bytes [-12, 6), expected them in [0, 24)"},
          {"after the buffer", [](Parts &p) { p.operand(1, 1).offset = 7; },
           "step 1 operand 1: found bytes [7, 25), expected them in [0, 24)"},
          {"far after the buffer", [](Parts &p) { p.operand(1, 1).offset = UINT64_MAX; },
           "step 1 operand 1: found bytes [1152921504606846976, 1152921504606846994), expected them in [0, 24)"},
          {"a row too long", [](Parts &p) { p.shape(1, 2).rowBytes = 9; },
           "step 1 operand 2: found bytes [16, 33), expected them in [0, 32)"},
          {"a stride too long", [](Parts &p) { p.loop(1, 5).stride = 11; },
           "step 1 operand 2: found bytes [16, 33), expected them in [0, 32)"},
          {"a loop too many", [](Parts &p) { p.loop(1, 1).count = 5; },
           "step 0 operand 0: found bytes [6, 40), expected them in [0, 32)"},
          {"a write to the source", [](Parts &p) { p.operand(1, 2).buffer = 1; },
           "step 1 operand 2: writes to buffer 1 of the source"},
          {"a copy from the target", // of rows 0, 1 to rows 2, 3
           [](Parts &p) { p.operand(1, 1) = {0, 3, 2}; },
           "step 1 operand 1: reads buffer 3, expected one of the source, or of a target rank in a send that waits for "
           "a receive or a copy"},
          {"a copy from a param that is cast",
           [](Parts &p) {
             p.manifest.endpoints[1]->params[0]->storage_dtype = DType::fp32;
             p.operand(1, 1) = {0, 3, 2};
           },
           "step 1 operand 1: reads a buffer that is converted on arrival, expected one that is stored as it was sent"},
          {"half an element that is cast",
           [](Parts &p) {
             p.manifest.endpoints[1]->params[0]->storage_dtype = DType::fp32;
             p.shape(1, 2).rowBytes = 5;
           },
           "step 1 operand 2: found an offset, row or stride that is no multiple of the 2 bytes that are converted at "
           "once"},
          {"the same bytes written for ever",
           [](Parts &p) {
             p.loop(1, 1) = {uint64_t{1} << 40, 0, 0};
             p.step(1, 0).bytes = uint64_t{1} << 42;
           },
           "step 0 operand 0: writes 4398046511104 bytes into an extent of 4 bytes"},
          {"different shapes, same bytes",
           [](Parts &p) {
             p.shape(1, 1).rowBytes = 12;
             p.loop(1, 3) = {1, 0, 0};
           },
           "step 1 copies input 0 of shape 1 to an output of shape 2, expected equal rows and loop counts"},
          {"different loops, same rows",
           [](Parts &p) {
             p.loop(1, 2) = {1, 0, 0};
             p.loop(1, 3) = {4, 6, 0};
           },
           "step 1 copies input 0 of shape 1 to an output of shape 2, expected equal rows and loop counts"},

          {"a local step with a peer", [](Parts &p) { p.step(1, 1).peer = 0; }, kNotLocal},
          {"a local step with a message", [](Parts &p) { p.step(1, 1).message = 1; }, kNotLocal},
          {"a local step with staging", [](Parts &p) { p.step(1, 1).staging = 0; }, kNotLocal},
          {"a peer outside the world", [](Parts &p) { p.step(1, 2).peer = 4; },
           "step 2 has rank 4 as its peer, expected another one below 4"},
          {"no peer", [](Parts &p) { p.step(1, 2).peer = UINT32_MAX; },
           "step 2 has rank 4294967295 as its peer, expected another one below 4"},
          {"itself as peer", [](Parts &p) { p.step(1, 2).peer = 1; },
           "step 2 has rank 1 as its peer, expected another one below 4"},
          {"a message number too large", [](Parts &p) { p.step(1, 2).message = 3; },
           "step 2 has message 3, expected one below 3"},
          {"staging beyond the arena", [](Parts &p) { p.step(1, 2).staging = 1; },
           "step 2 stages 24 bytes at 1, expected them in an arena of 24 bytes"},
          {"staging far beyond the arena", [](Parts &p) { p.step(1, 2).staging = UINT64_MAX - 1; },
           "step 2 stages 24 bytes at 18446744073709551614, expected them in an arena of 24 bytes"},
      },
      "the segment of rank 1 is inconsistent: ");
}

// Unusual, but allowed.
TEST(Load, Allowed) {
  expectRefusal(
      {
          {"negative strides, both sides",
           [](Parts &p) { // the copy's rows from the last to the first
             p.segments[1].loops.insert(p.segments[1].loops.end(), {{2, 0, 1}, {2, -12, 0}, {2, 0, 1}, {2, -8, 0}});
             p.segments[1].shapes.insert(p.segments[1].shapes.end(), {{6, 6, 2}, {6, 8, 2}});
             p.operand(1, 1) = {12, 1, 3};
             p.operand(1, 2) = {24, 3, 4};
           },
           ""},
          {"negative buffer steps",
           [](Parts &p) {
             p.segments[1].loops.insert(p.segments[1].loops.end(), {{2, 0, -1}, {2, 12, 0}, {2, 0, -1}, {2, 8, 0}});
             p.segments[1].shapes.insert(p.segments[1].shapes.end(), {{6, 6, 2}, {6, 8, 2}});
             p.operand(1, 1) = {0, 2, 3};
             p.operand(1, 2) = {16, 4, 4};
           },
           ""},
          {"one source row to many", [](Parts &p) { p.loop(1, 3).stride = 0; }, ""},
          {"a message in place", [](Parts &p) { p.step(1, 2).staging = UINT64_MAX; }, ""},
          {"an unused shape",
           [](Parts &p) { p.segments[1].shapes.push_back({uint64_t{1}, uint32_t(p.segments[1].loops.size()), 0}); },
           ""},
          {"no limit", [](Parts &p) { p.manifest.staging_limit = 0; }, ""},
          {"a larger arena", [](Parts &p) { p.manifest.arena_bytes = p.segments[1].arena_bytes = 64; }, ""},
          {"dependency levels with gaps", [](Parts &p) { p.step(1, 3).level = p.step(2, 1).level = UINT16_MAX; }, ""},
          {"a send of a lower dependency level than the one whose slot it uses",
           [](Parts &p) {
             p.step(0, 0).level = p.step(1, 2).level = 7;
             p.step(1, 3).level = p.step(2, 1).level = 8;
           },
           ""},
          {"an idle rank without tables", [](Parts &p) { EXPECT_TRUE(p.segments[3].steps.empty()); }, ""},
      },
      "");
}

// A vector of structs that is not aligned, which the builder never writes and the FlatBuffers verifier does not detect.
TEST(Load, MisalignedStructs) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  const Parts parts = tinyParts();
  std::vector<std::string> segments = serialized(parts.segments);
  // Appends 4 bytes, then a copy of the loops, the only vector of 24-byte structs, and redirects the root to the copy.
  std::string &bytes = segments[0];
  const auto *root = flatbuffers::GetSizePrefixedRoot<Segment>(bytes.data());
  const char *loops = reinterpret_cast<const char *>(root->loops());
  const std::string moved(loops, 4 + root->loops()->size() * sizeof(Loop));
  const char *field = nullptr; // the root's offset to the loops
  for (const char *at = reinterpret_cast<const char *>(root); at + 4 <= bytes.data() + bytes.size(); at += 4) {
    uint32_t offset = 0;
    std::memcpy(&offset, at, 4);
    if (at + offset == loops) {
      field = at;
      break;
    }
  }
  ASSERT_NE(field, nullptr);
  const size_t fieldAt = static_cast<size_t>(field - bytes.data());
  while (bytes.size() % 8 != 0)
    bytes.push_back('\0');
  const auto offset = static_cast<uint32_t>(bytes.size() - fieldAt); // its elements begin 4 bytes later
  std::memcpy(bytes.data() + fieldAt, &offset, 4);
  bytes += moved;
  const auto size = static_cast<uint32_t>(bytes.size() - 4);
  std::memcpy(bytes.data(), &size, 4);
  writeContainer(path, serialized(parts.manifest), segments);
  EXPECT_EQ(readAll(path), "the segment of rank 0 is inconsistent: a table is not aligned to 8 bytes");
}

// Message 2 goes from rank 1 (its step 3) to rank 2 (its step 1), both in round 1.
TEST(Load, Messages) {
  expectRefusal(
      {
          {"sent twice", [](Parts &p) { p.step(0, 1).message = 0; },
           "message 0 is sent twice, by rank 0 and by rank 0"},
          {"received twice", [](Parts &p) { p.step(2, 1).message = 0; },
           "message 0 is received twice, by rank 1 and by rank 2"},
          {"not sent",
           [](Parts &p) {
             p.segments[1].steps.pop_back();
             p.segments[1].operands.pop_back();
             p.segments[1].after.clear();
           },
           "message 2 is received but not sent"},
          {"not received",
           [](Parts &p) {
             p.segments[2].steps.pop_back();
             p.segments[2].operands.pop_back();
           },
           "message 1 is sent but not received"},
          {"neither", [](Parts &p) { p.manifest.messages = 4; }, "message 3 is neither sent nor received"},
          {"the sender names another", [](Parts &p) { p.step(1, 3).peer = 3; },
           "message 2 from rank 1 to rank 2: found peers 3 and 1, expected each other"},
          {"the receiver names another", [](Parts &p) { p.step(2, 1).peer = 3; },
           "message 2 from rank 1 to rank 2: found peers 2 and 3, expected each other"},
          {"another round", [](Parts &p) { p.step(1, 3).round = 0; },
           "message 2 from rank 1 to rank 2: found round 0 on the sender, 1 on the receiver, expected the same"},
          {"another dependency level", [](Parts &p) { p.step(1, 3).level = 2; },
           "message 2 from rank 1 to rank 2: found dependency level 2 on the sender, 1 on the receiver, expected the "
           "same"},
          {"other bytes",
           [](Parts &p) {
             p.shape(2, 1).rowBytes = 5;
             p.step(2, 1).bytes = p.step(2, 2).bytes = 20;
           },
           "message 1 from rank 0 to rank 2: found bytes 24 on the sender, 20 on the receiver, expected the same"},
          {"operands split differently",
           [](Parts &p) {
             p.segments[2].loops.push_back({2, 8, 0});
             p.segments[2].shapes.push_back({6, 4, 1});
             p.segments[2].operands = {p.segments[2].operands[0], {16, 1, 2}, {16, 2, 2}, p.segments[2].operands[2]};
             p.step(2, 1).outputCount = 2;
             p.step(2, 2).firstInput = p.step(2, 2).firstOutput = 3;
           },
           "message 2 from rank 1 to rank 2: found operands 1 on the sender, 2 on the receiver, expected the same"},
          {"different shapes",
           [](Parts &p) {
             p.segments[2].loops.insert(p.segments[2].loops.end(), {{2, 0, 1}, {3, 8, 0}});
             p.segments[2].shapes.push_back({4, 4, 2});
             p.operand(2, 1) = {0, 1, 2};
           },
           "message 2 from rank 1 to rank 2: operand shapes differ at operand 0, expected equal rows and loop counts"},
      },
      "");
}

/// Writes the plan of a lesson.
static void compileLesson(const std::string &lesson, const CompileOptions &options, const std::string &path) {
  CompileResult result;
  Diagnostics diagnostics;
  ASSERT_TRUE(compileJob(RESHARD_SOURCE_DIR "/tests/compiler/lessons/" + lesson, options, result, diagnostics))
      << diagnostics.text();
  llvm::Expected<WrittenPlan> written = writePlan(result.module, *result.ranks, result.statistics, path);
  ASSERT_TRUE(!!written) << toString(written.takeError());
}

TEST(Load, MessagesWithOtherChunks) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  ASSERT_NO_FATAL_FAILURE(compileLesson("staging_rounds.yaml", {}, path));
  Parts parts = unpack(path);
  ASSERT_EQ(static_cast<StepKind>(parts.step(2, 0).kind), StepKind::recv);
  parts.step(2, 0).chunk = 512;
  pack(parts, path);
  EXPECT_EQ(readAll(path), "message 0 from rank 0 to rank 2: found chunks 1024 on the sender, 512 on the receiver, "
                           "expected the same");
}

// The lesson's plan without a pool has a relay, rank 1, which receives. As a pool it would be pulled from.
TEST(Load, SourcesOfAPoolOnlySend) {
  CompileOptions options;
  options.overrides = {"target={mesh: {dp: 2}, ranks: 2..3}"};
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  ASSERT_NO_FATAL_FAILURE(compileLesson("pool.yaml", options, path));
  Parts parts = unpack(path);
  parts.manifest.endpoints[1]->replicas = 2;
  pack(parts, path);
  EXPECT_EQ(readAll(path), "the segment of rank 1 is inconsistent: step 0 receives message 0, expected none on a rank "
                           "below those of the engine replicas, which pull");
}

TEST(Load, CountsThatDoNotMatchTheFile) {
  expectRefusal(
      {{"world", [](Parts &p) { p.manifest.world = 3; }, "found a world of 3 ranks, the file has 4 segments"},
       {"world", [](Parts &p) { p.manifest.world = 5; }, "found a world of 5 ranks, the file has 4 segments"}},
      "the manifest is inconsistent: ");
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  Parts parts = tinyParts();
  parts.manifest.messages = UINT32_MAX;
  pack(parts, path);
  EXPECT_EQ(readAll(path), "the manifest is inconsistent: found 4294967295 messages, more than a plan of " +
                               std::to_string(std::filesystem::file_size(path)) + " bytes can describe");
}

// Each byte altered, with updated digests: the plan is refused, or read to the end without errors of the sanitizers.
TEST(Load, EveryByteAltered) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  const Parts parts = tinyParts();
  std::vector<std::string> segments = serialized(parts.segments);
  std::string manifest = serialized(parts.manifest);
  size_t refused = 0, all = 0;
  std::set<std::string> messages;
  std::vector<std::string *> blobs = {&manifest};
  for (std::string &segment : segments)
    blobs.push_back(&segment);
  for (std::string *blob : blobs)
    for (size_t at = 0; at < blob->size(); ++at) {
      const char before = (*blob)[at];
      std::vector<int> values = {0x80, 0xff, before ^ 1};
      if (std::getenv("RESHARD_FULL"))
        values.insert(values.end(), {0, 1, 0x7f, before + 1, before + 8});
      for (const int value : values) {
        (*blob)[at] = static_cast<char>(value);
        writeContainer(path, manifest, segments);
        const std::string error = readAll(path);
        ++all;
        refused += error.empty() ? 0 : 1;
        messages.insert(error);
      }
      (*blob)[at] = before;
    }
  EXPECT_GT(refused, all / 4);
  EXPECT_GT(messages.size(), 100u);
}
