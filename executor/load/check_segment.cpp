// SPDX-License-Identifier: Apache-2.0
// Checks a segment from the front: its buffers against the manifest, shapes, operands, then each step with the steps
// before it. Error texts are built only after a check has failed.
#include "executor/load/load.h"

#include "schema/flatbuffer_vectors.h"
#include "schema/limits.h"
#include "schema/step_rules.h"

#include <algorithm>
#include <numeric>

namespace reshard {
namespace {

using namespace schema;

constexpr uint32_t kNoPeer = UINT32_MAX;
constexpr uint64_t kInPlace = UINT64_MAX;

std::string text(uint64_t number) { return std::to_string(number); }
std::string range(int64_t begin, int64_t end) { return "[" + std::to_string(begin) + ", " + std::to_string(end) + ")"; }

/// A range of buffers: numbers [first, first + count), `bytes` each.
struct Buffers {
  int64_t first = 0, count = 0, bytes = 0;
  bool source = false, storage = false, derived = false;
  /// If the buffer is converted on arrival: the bytes that are written at once, an element or a block. Else 0.
  int64_t block = 0;
  /// If the buffer is staged before it is quantized: bytes of a matrix, and of a row of its blocks. Else 0.
  int64_t matrix = 0, rows = 0;
  bool amax = false; // a target's quantized view `amax`
};

/// The extent of a shape relative to its operand's offset: rows begin at bytes [low, high] of buffers [lowBuffer,
/// highBuffer].
struct ShapeExtent {
  int64_t bytes, row, low, high, lowBuffer, highBuffer;
  int64_t unit; // the greatest common divisor of row bytes and strides
  /// Strided ranges beyond the first to which expand() (operands.h) expands it: one for each iteration of the loops
  /// down to the innermost that changes the buffer.
  int64_t ranges;
};

/// A phase of the check. Functions return false at the first problem. Error texts are built only then, since there may
/// be millions of operands.
class Phase {
public:
  /// The problem, after a function has returned false.
  const std::string &error() const { return error_; }

protected:
  bool fail(std::string text) {
    error_ = std::move(text);
    return false;
  }

private:
  std::string error_;
};

/// Checks that all tables are there, and the numbers of the segment.
Status checkTables(const Manifest &manifest, const Segment &segment, uint32_t rank) {
  const std::pair<const char *, bool> tables[] = {{"buffers", segment.buffers()}, {"loops", segment.loops()},
                                                  {"shapes", segment.shapes()},   {"operands", segment.operands()},
                                                  {"steps", segment.steps()},     {"after", segment.after()}};
  for (const auto &[name, found] : tables)
    if (!found)
      return badPlan(std::string("table '") + name + "' is missing (an empty table is allowed)");
  // The verifier does not check the alignment of vectors of structs.
  auto aligned = [](const auto *vector) {
    return vector->size() == 0 || reinterpret_cast<uintptr_t>(vector->Data()) % alignof(uint64_t) == 0;
  };
  if (!aligned(segment.buffers()) || !aligned(segment.loops()) || !aligned(segment.shapes()) ||
      !aligned(segment.operands()) || !aligned(segment.steps()))
    return badPlan("a table is not aligned to 8 bytes");
  if (segment.rank() != rank)
    return badPlan("found rank " + text(segment.rank()) + ", expected " + text(rank));
  if (segment.arena_bytes() > static_cast<uint64_t>(kMaxSize))
    return badPlan("found an arena of " + text(segment.arena_bytes()) + " bytes, expected at most " + text(kMaxSize));
  if (segment.arena_bytes() > manifest.arena_bytes())
    return badPlan("found an arena of " + text(segment.arena_bytes()) + " bytes, expected at most the " +
                   text(manifest.arena_bytes()) + " of the manifest");
  if (manifest.staging_limit() > 0 && segment.arena_bytes() > manifest.staging_limit())
    return badPlan("found an arena of " + text(segment.arena_bytes()) +
                   " bytes, expected at most the staging limit of " + text(manifest.staging_limit()));
  return {};
}

/// The buffers of a rank, which are checked against the manifest.
class SegmentBuffers : public Phase {
public:
  SegmentBuffers(const Manifest &manifest, const MeshRankIndex &meshRanks, const Segment &segment, uint32_t rank)
      : manifest_(manifest), meshRanks_(meshRanks), segment_(segment), rank_(rank) {}

  /// The buffers must be those that the manifest gives this rank: for each endpoint its own mesh rank, or for a storage
  /// endpoint all files; for each of these the params with instances, in the order of the manifest.
  bool check() {
    buffers_.push_back({.count = 1, .bytes = static_cast<int64_t>(segment_.arena_bytes())});
    for (uint32_t e = 0; e < manifest_.endpoints()->size(); ++e) {
      const Endpoint &endpoint = *manifest_.endpoints()->Get(e);
      const std::optional<uint32_t> own = endpoint.storage() ? std::nullopt : meshRanks_.find(e, rank_);
      const uint32_t begin = own.value_or(0), end = endpoint.storage() ? endpoint.ranks()->size() : own ? begin + 1 : 0;
      for (uint32_t meshRank = begin; meshRank < end; ++meshRank)
        for (uint32_t p = 0; p < sizeOf(endpoint.params()); ++p)
          if (!bufferRange(e, meshRank, p))
            return false;
    }
    if (staged_ > segment_.arena_bytes())
      return fail("found an arena of " + text(segment_.arena_bytes()) + " bytes, expected " + text(staged_) +
                  " or more for staged buffers");
    return ranges_ == sizeOf(segment_.buffers()) ||
           fail("found " + text(sizeOf(segment_.buffers())) + " buffer ranges, expected " + text(ranges_) +
                " as in the manifest");
  }

  /// The range that has a buffer, which must exist.
  const Buffers &rangeOf(uint32_t buffer) const {
    return *std::prev(std::upper_bound(buffers_.begin(), buffers_.end(), int64_t{buffer},
                                       [](int64_t b, const Buffers &r) { return b < r.first; }));
  }
  /// Bytes at the arena's end, of views and transforms.
  uint64_t staged() const { return staged_; }
  /// Whether the rank stages elements in the arena and quantizes whole rows of blocks.
  bool stages() const { return stages_; }

private:
  /// The next BufferRange must be that of the instances of a param on a mesh rank, if there are any.
  bool bufferRange(uint32_t e, uint32_t meshRank, uint32_t p) {
    const Endpoint &endpoint = *manifest_.endpoints()->Get(e);
    const Param &param = *endpoint.params()->Get(p);
    const uint64_t count = static_cast<uint64_t>(instanceCount(endpoint, param, meshRank));
    if (count == 0)
      return true;
    uint64_t bytes = static_cast<uint64_t>(itemBytes(param.dtype()));
    for (int64_t length : localShape(endpoint, param, meshRank))
      bytes *= static_cast<uint64_t>(length);
    if (ranges_ == sizeOf(segment_.buffers()))
      return fail("found " + text(ranges_) + " buffer ranges, expected one more for param '" + param.name()->str() +
                  "' of endpoint " + text(e));
    const BufferRange &entry = *segment_.buffers()->Get(static_cast<uint32_t>(ranges_));
    const std::string where = "buffer range " + text(ranges_++) + ": ";
    auto is = [&](const char *what, uint64_t found, uint64_t expected) {
      return found == expected || fail(where + "found " + what + " " + text(found) + ", expected " + text(expected) +
                                       " (param '" + param.name()->str() + "')");
    };
    if (!is("endpoint", entry.endpoint(), e) || !is("mesh rank", entry.mesh_rank(), meshRank) ||
        !is("param", entry.param(), p) || !is("first buffer", entry.first(), nextBuffer_) ||
        !is("count", entry.count(), count) || !is("bytes", entry.bytes(), bytes) ||
        !is("reserved", entry.reserved(), 0))
      return false;
    addBuffers(entry, endpoint, param);
    // The executor's own sums of staged bytes are at most this one, so they cannot overflow after this check.
    if (uint64_t each = 0; inArena(param) && (__builtin_mul_overflow(count, stagedBytes(entry), &each) ||
                                              __builtin_add_overflow(staged_, each, &staged_) ||
                                              staged_ > static_cast<uint64_t>(kMaxSize)))
      return fail(where + "found " + text(count) + " buffers of " + text(bytes) + " bytes to stage, expected at most " +
                  text(kMaxSize) + " bytes for all staged buffers");
    nextBuffer_ += count;
    return nextBuffer_ <= UINT32_MAX || fail("found " + text(nextBuffer_) + " buffers, expected fewer than 2^32");
  }

  /// Adds the buffers of a range that has been checked, and how they are converted on arrival.
  void addBuffers(const BufferRange &entry, const Endpoint &endpoint, const Param &param) {
    const bool source = entry.endpoint() == 0;
    const QuantizedView *view = param.view();
    const bool elements = view && view->kind() == ViewKind::elements && !source, arrives = elements && !view->staged();
    Buffers &buffers = buffers_.emplace_back(Buffers{.first = entry.first(),
                                                     .count = entry.count(),
                                                     .bytes = static_cast<int64_t>(entry.bytes()),
                                                     .source = source,
                                                     .storage = endpoint.storage(),
                                                     .derived = param.derived()});
    const int64_t item = itemBytes(param.dtype());
    buffers.block = elements && !arrives    ? item
                    : arrives               ? item * formatOf(*view).blockColumns
                    : param.storage_dtype() ? item
                                            : 0;
    if (elements && !arrives && entry.bytes() > 0) { // quantized by whole rows of blocks
      const std::vector<int64_t> shape = localShape(endpoint, param, entry.mesh_rank());
      const int64_t row = shape.back() * item;
      buffers.matrix = shape[shape.size() - 2] * row;
      buffers.rows = formatOf(*view).blockRows * row;
      stages_ = true;
    }
    buffers.amax = !source && view && view->kind() == ViewKind::amax;
  }

  const Manifest &manifest_;
  const MeshRankIndex &meshRanks_;
  const Segment &segment_;
  const uint32_t rank_;
  std::vector<Buffers> buffers_; // ascending by their first buffer; the first is the arena
  size_t ranges_ = 0;            // how many were checked
  uint64_t nextBuffer_ = 1;      // after these
  uint64_t staged_ = 0;
  bool stages_ = false;
};

/// The extents of the shapes.
class ShapeExtents : public Phase {
public:
  explicit ShapeExtents(const Segment &segment) : segment_(segment) {}

  /// Shapes must use the table of loops in order and without gaps, so that each loop is read once even in a hostile
  /// plan.
  bool check() {
    uint64_t next = 0;
    extents_.reserve(sizeOf(segment_.shapes()));
    for (uint32_t s = 0; s < sizeOf(segment_.shapes()); ++s) {
      const Shape &shape = *segment_.shapes()->Get(s);
      if (shape.first_loop() != next || shape.loop_count() > sizeOf(segment_.loops()) - next)
        return fail("shape " + text(s) + ": found loops " +
                    range(shape.first_loop(), int64_t{shape.first_loop()} + shape.loop_count()) +
                    ", expected them from " + text(next) + " within " + text(sizeOf(segment_.loops())));
      if (shape.loop_count() > kMaxLoops)
        return fail("shape " + text(s) + ": found " + text(shape.loop_count()) + " loops, expected at most " +
                    text(kMaxLoops));
      if (!this->shape(shape))
        return fail("shape " + text(s) + ": row bytes, loop counts or their product are out of range, expected 1 to " +
                    text(kMaxSize) + "; strides and extents at most that in size");
      next += shape.loop_count();
    }
    return next == sizeOf(segment_.loops()) ||
           fail("found " + text(sizeOf(segment_.loops())) + " loops, expected the " + text(next) + " of the shapes");
  }

  /// By shape.
  const std::vector<ShapeExtent> &extents() const { return extents_; }

private:
  bool shape(const Shape &shape) {
    if (shape.row_bytes() < 1 || shape.row_bytes() > static_cast<uint64_t>(kMaxSize))
      return false;
    ShapeExtent extent{static_cast<int64_t>(shape.row_bytes()),
                       static_cast<int64_t>(shape.row_bytes()),
                       0,
                       0,
                       0,
                       0,
                       static_cast<int64_t>(shape.row_bytes()),
                       0};
    auto reach = [](int64_t steps, int64_t step, int64_t &low, int64_t &high) {
      int64_t span = 0;
      int64_t &end = step < 0 ? low : high;
      return !__builtin_mul_overflow(steps, step, &span) && !__builtin_add_overflow(end, span, &end) &&
             end >= -kMaxSize && end <= kMaxSize;
    };
    for (uint32_t l = 0; l < shape.loop_count(); ++l) {
      const Loop &loop = *segment_.loops()->Get(shape.first_loop() + l);
      if (loop.count() < 1 || loop.count() > static_cast<uint64_t>(kMaxSize))
        return false;
      const int64_t count = static_cast<int64_t>(loop.count());
      if (loop.stride() < -kMaxSize || loop.stride() > kMaxSize)
        return false;
      extent.unit = std::gcd(extent.unit, loop.stride());
      if (__builtin_mul_overflow(extent.bytes, count, &extent.bytes) || extent.bytes > kMaxSize ||
          !reach(count - 1, loop.stride(), extent.low, extent.high) ||
          !reach(count - 1, loop.buffer_step(), extent.lowBuffer, extent.highBuffer))
        return false;
      if (loop.buffer_step() != 0)
        extent.ranges = extent.bytes / extent.row - 1;
    }
    extents_.push_back(extent);
    return true;
  }

  const Segment &segment_;
  std::vector<ShapeExtent> extents_;
};

/// The operands, one by one, against buffers and extents that have been checked.
class OperandCheck : public Phase {
public:
  OperandCheck(const Segment &segment, const SegmentBuffers &buffers, const std::vector<ShapeExtent> &extents)
      : segment_(segment), buffers_(buffers), extents_(extents) {}

  /// An operand must be inside one range of buffers, and inside the bytes of each buffer, over all loops. Adds its
  /// bytes to `sum`.
  bool check(uint32_t number, bool output, int64_t &sum) {
    const Operand &operand = *segment_.operands()->Get(number);
    if (operand.shape() >= extents_.size())
      return fail("operand " + text(number) + ": found shape " + text(operand.shape()) + ", expected one below " +
                  text(extents_.size()));
    const ShapeExtent &extent = extents_[operand.shape()];
    const int64_t buffer = operand.buffer();
    const Buffers *buffers = last_;
    if (buffer < buffers->first || buffer >= buffers->first + buffers->count) {
      buffers = &buffers_.rangeOf(operand.buffer()); // exists: the arena is buffer 0
      if (buffer >= buffers->first + buffers->count)
        return fail("operand " + text(number) + ": found buffer " + text(operand.buffer()) + ", expected one below " +
                    text(buffers->first + buffers->count));
      last_ = buffers;
    }
    if (output && buffers->source)
      return fail("operand " + text(number) + ": writes to buffer " + text(operand.buffer()) + " of the source");
    if (buffer + extent.lowBuffer < buffers->first || buffer + extent.highBuffer >= buffers->first + buffers->count)
      return fail("operand " + text(number) + ": found buffers " +
                  range(buffer + extent.lowBuffer, buffer + extent.highBuffer + 1) + ", expected them in " +
                  range(buffers->first, buffers->first + buffers->count));
    const bool far = operand.offset() > static_cast<uint64_t>(kMaxSize);
    const int64_t offset = far ? kMaxSize : static_cast<int64_t>(operand.offset());
    if (far || offset + extent.low < 0 || offset + extent.high + extent.row > buffers->bytes)
      return fail("operand " + text(number) + ": found bytes " +
                  range(offset + extent.low, offset + extent.high + extent.row) + ", expected them in " +
                  range(0, buffers->bytes));
    if (buffers->block > 0 && (extent.unit % buffers->block != 0 || offset % buffers->block != 0))
      return fail("operand " + text(number) + ": found an offset, row or stride that is no multiple of the " +
                  text(buffers->block) + " bytes that are converted at once");
    if (output && buffers->derived)
      return fail("operand " + text(number) + ": writes buffer " + text(operand.buffer()) +
                  ", which is derived from others");
    // An operand of more bytes than its extent would write some twice, and a hostile loop count might never end.
    const __int128 capacity =
        static_cast<__int128>(extent.high - extent.low + extent.row) * (extent.highBuffer - extent.lowBuffer + 1);
    if (output && extent.bytes > capacity)
      return fail("operand " + text(number) + ": writes " + text(extent.bytes) + " bytes into an extent of " +
                  text(static_cast<uint64_t>(capacity)) + " bytes");
    if (extent.ranges > kMaxOperandRanges - ranges_)
      return fail("operand " + text(number) + ": the operands expand to more than " + text(kMaxOperandRanges) +
                  " strided ranges, the limit");
    ranges_ += extent.ranges;
    sum += extent.bytes;
    return sum <= kMaxSize || fail("has operands of more than " + text(kMaxSize) + " bytes");
  }

  /// The buffers of the last operand.
  const Buffers &last() const { return *last_; }

private:
  const Segment &segment_;
  const SegmentBuffers &buffers_;
  const std::vector<ShapeExtent> &extents_; // by shape
  int64_t ranges_ = 0;                      // how many all operands have
  const Buffers *last_ = &kNone;            // consecutive operands often share them
  static constexpr Buffers kNone{};
};

/// The steps, each with the steps before it.
class StepCheck : public Phase {
public:
  StepCheck(const Manifest &manifest, const Segment &segment, uint32_t rank, const SegmentBuffers &buffers,
            const std::vector<ShapeExtent> &extents)
      : manifest_(manifest), segment_(segment), rank_(rank), buffers_(buffers), extents_(extents),
        operand_(segment, buffers, extents) {}

  bool check() {
    uint32_t round = 0;
    uint64_t operands = 0, after = 0;
    for (step_ = 0; step_ < sizeOf(segment_.steps()); ++step_) {
      const Step &step = *segment_.steps()->Get(step_);
      if (step.round() < round || step.round() >= manifest_.rounds())
        return failStep("found round " + text(step.round()) + ", expected " + text(round) + " or later and before " +
                        text(manifest_.rounds()));
      round = step.round();
      // Operands, too, must be used in order and without gaps: of each step the inputs, then the outputs. A send may
      // have the inputs of an earlier one.
      const uint64_t left = sizeOf(segment_.operands()) - operands;
      const bool sharedInputs = sharesInputs(step);
      if (sharedInputs) {
        if (step.output_count() != 0 || step.first_output() != step.first_input() + step.input_count())
          return failStep("has the inputs of an earlier send, and " + text(step.output_count()) +
                          " outputs at operand " + text(step.first_output()) + ", expected none after its inputs");
      } else if (step.first_input() != operands || step.input_count() > left ||
                 step.first_output() != operands + step.input_count() ||
                 step.output_count() > left - step.input_count())
        return failStep("found its inputs at operand " + text(step.first_input()) + " and its outputs at " +
                        text(step.first_output()) + ", expected them from " + text(operands) + " within " +
                        text(sizeOf(segment_.operands())));
      uses_ += uint64_t{step.input_count()} + step.output_count();
      if (uses_ > kMaxOperandUses)
        return failStep("is the first by which the steps have more than " + text(kMaxOperandUses) +
                        " operands, the limit");
      if (!sharedInputs) {
        operands += uint64_t{step.input_count()} + step.output_count();
        if (step.kind() == StepKind::send)
          sent_.emplace_back(step.first_input(), step.input_count());
      }
      if (step.first_after() != after || step.after_count() > sizeOf(segment_.after()) - after)
        return failStep("found its 'after' list at " + text(step.first_after()) + ", expected it at " + text(after) +
                        " within " + text(sizeOf(segment_.after())));
      for (uint32_t i = 0; i < step.after_count(); ++i)
        if (const uint32_t earlier = segment_.after()->Get(step.first_after() + i); earlier >= step_)
          return failStep("waits for step " + text(earlier) + ", expected an earlier one");
      after += step.after_count();
      if (!level(step) || !this->step(step))
        return false;
    }
    if (operands != sizeOf(segment_.operands()) || after != sizeOf(segment_.after()))
      return fail("found " + text(sizeOf(segment_.operands())) + " operands and " + text(sizeOf(segment_.after())) +
                  " entries of 'after', expected " + text(operands) + " and " + text(after) + " as in the steps");
    return true;
  }

private:
  bool failStep(const std::string &text) { return fail("step " + std::to_string(step_) + " " + text); }

  /// Whether the inputs of a step are exactly the inputs of an earlier send that has its own.
  bool sharesInputs(const Step &step) const {
    return step.kind() == StepKind::send && step.input_count() > 0 &&
           std::binary_search(sent_.begin(), sent_.end(), std::pair(step.first_input(), step.input_count()));
  }

  /// Transports that copy between the ranks of one process order their copies by the dependency level alone.
  bool level(const Step &step) {
    for (uint32_t i = 0; i < step.after_count(); ++i) {
      const uint32_t earlier = segment_.after()->Get(step.first_after() + i);
      if (const Step &before = *segment_.steps()->Get(earlier);
          raisesLevel(before.kind(), step.kind()) && step.level() <= before.level())
        return failStep("has dependency level " + text(step.level()) + ", expected more than the " +
                        text(before.level()) + " of step " + text(earlier) + ", for which it waits");
    }
    return true;
  }

  bool step(const Step &step) {
    const bool message = step.kind() == StepKind::send || step.kind() == StepKind::recv;
    if (step.kind() == StepKind::recv && isPassive())
      return failStep("receives message " + text(step.message()) +
                      ", expected none on a rank below those of the engine replicas, which pull");
    switch (step.kind()) {
    case StepKind::copy:
      if (step.input_count() != step.output_count())
        return failStep("copies " + text(step.input_count()) + " inputs to " + text(step.output_count()) +
                        " outputs, expected as many outputs as inputs");
      break;
    case StepKind::send:
      if (step.output_count() != 0)
        return failStep("is a send with outputs, expected none");
      break;
    case StepKind::recv:
    case StepKind::fill:
      if (step.input_count() != 0)
        return failStep(step.kind() == StepKind::fill ? "is a fill with inputs, expected none"
                                                      : "is a receive with inputs, expected none");
      break;
    case StepKind::reduce:
      if (step.output_count() != 0)
        return failStep("is a reduce with outputs, expected none");
      break;
    default:
      return failStep("is of kind " + text(static_cast<uint8_t>(step.kind())) +
                      ", which this version does not support");
    }
    if (step.input_count() + uint64_t{step.output_count()} == 0)
      return failStep("has no operands");
    int64_t in = 0, out = 0;
    for (uint32_t i = 0; i < step.input_count(); ++i)
      if (!operand(step.first_input() + i, false, in) || !readable(step, step.first_input() + i))
        return false;
    for (uint32_t i = 0; i < step.output_count(); ++i)
      if (!operand(step.first_output() + i, true, out) ||
          (operand_.last().first == 0 && !buffers_.stages() && !relay(step, step.first_output() + i)))
        return false;
    const uint64_t found =
        static_cast<uint64_t>(step.kind() == StepKind::send || step.kind() == StepKind::reduce ? in : out);
    if (found != step.bytes())
      return failStep("has operands of " + text(found) + " bytes, expected " + text(step.bytes()));
    if (step.kind() == StepKind::copy && !(pairs(step) && stagedRows(step)))
      return false;
    if (step.kind() != StepKind::copy && !stagedRows(step))
      return false;
    return message ? this->message(step) : local(step);
  }

  bool local(const Step &step) {
    return (step.peer() == kNoPeer && step.message() == 0 && step.staging() == kInPlace && step.chunk() == 0 &&
            step.slot() == 0) ||
           failStep("is local but has a peer, a message, staging or chunks");
  }

  bool message(const Step &step) {
    if (step.peer() >= manifest_.world() || step.peer() == rank_)
      return failStep("has rank " + text(step.peer()) + " as its peer, expected another one below " +
                      text(manifest_.world()));
    if (step.message() >= manifest_.messages())
      return failStep("has message " + text(step.message()) + ", expected one below " + text(manifest_.messages()));
    if (step.chunk() % kChunkAlignment != 0 || (step.chunk() > 0 && step.chunk() >= step.bytes()))
      return failStep("has chunks of " + text(step.chunk()) + " bytes, expected a multiple of " +
                      text(kChunkAlignment) + " below its " + text(step.bytes()));
    if (step.chunk() > 0) {
      const int64_t chunks = static_cast<int64_t>((step.bytes() - 1) / step.chunk()) + 1,
                    each = 1 + int64_t{step.after_count()};
      if (chunks > (kMaxChunks - chunks_) / each)
        return failStep("messages have more than " + text(kMaxChunks) +
                        " chunks in all (each counted once more for each step that it waits for), which is the limit");
      chunks_ += chunks * each;
    }
    if (step.slot() > (step.chunk() > 0 && step.staging() != kInPlace ? 1 : 0))
      return failStep("begins in slot " + text(step.slot()) +
                      ", expected 0, or 1 of a staged message of several chunks");
    if (step.staging() == kInPlace)
      return true;
    const uint64_t staged = step.chunk() > 0 ? 2 * step.chunk() : step.bytes();
    if (step.staging() > segment_.arena_bytes() - buffers_.staged() ||
        staged > segment_.arena_bytes() - buffers_.staged() - step.staging())
      return failStep("stages " + text(staged) + " bytes at " + text(step.staging()) +
                      ", expected them in an arena of " + text(segment_.arena_bytes() - buffers_.staged()) + " bytes");
    bool right = true;
    arena_.take(static_cast<int64_t>(step.staging()), static_cast<int64_t>(step.staging() + staged), step_,
                [&](uint32_t before) {
                  if (right && !waits(step, before))
                    right = failStep("overwrites arena bytes that step " + text(before) +
                                     " used, expected it to wait for that step");
                });
    return right;
  }

  bool waits(const Step &step, uint32_t before) const {
    for (uint32_t i = 0; i < step.after_count(); ++i)
      if (segment_.after()->Get(step.first_after() + i) == before)
        return true;
    return false;
  }

  /// Inputs are of the source. Exceptions: a copy reads staged elements of the arena; a send forwards bytes of the
  /// arena or of a target, and must wait for a receive or a copy that wrote them.
  bool readable(const Step &step, uint32_t number) {
    if (operand_.last().block > 0)
      return failStep("operand " + text(number) +
                      ": reads a buffer that is converted on arrival, expected one that "
                      "is stored as it was sent");
    if (step.kind() == StepKind::reduce)
      return operand_.last().amax ||
             failStep("operand " + text(number) + ": is reduced, expected a buffer of amax values");
    if (operand_.last().source)
      return true;
    if (step.kind() == StepKind::copy && operand_.last().first == 0) // staged elements
      return step.after_count() > 0 ||
             failStep("operand " + text(number) + ": reads the arena, expected the step to wait for its writers");
    bool received = false;
    for (uint32_t i = 0; i < step.after_count(); ++i)
      if (const StepKind before = segment_.steps()->Get(segment_.after()->Get(step.first_after() + i))->kind();
          before == StepKind::recv || before == StepKind::copy)
        received = true;
    if (step.kind() == StepKind::send && operand_.last().first == 0)
      return relay(step, number);
    return (step.kind() == StepKind::send && operand_.last().count > 0 && operand_.last().first > 0 &&
            !operand_.last().storage && received) ||
           failStep("operand " + text(number) + ": reads buffer " + text(segment_.operands()->Get(number)->buffer()) +
                    ", expected one of the source, or of a target rank in a send that waits for a receive or a copy");
  }

  /// Relayed bytes are written to the arena by receives and read from it by sends, in turn: a send waits for the
  /// receives of its bytes, a receive waits for the sends of the bytes that it overwrites. They are contiguous. A rank
  /// that stages elements to quantize them relays nothing.
  bool relay(const Step &step, uint32_t number) {
    const Operand &operand = *segment_.operands()->Get(number);
    const Shape &shape = *segment_.shapes()->Get(operand.shape());
    auto fail = [&](const std::string &why) { return failStep("operand " + text(number) + ": " + why); };
    if (step.kind() != StepKind::send && step.kind() != StepKind::recv)
      return fail("writes to the arena, expected only receives to do so on a rank that quantizes nothing in the arena");
    if (buffers_.stages())
      return fail("sends bytes of the arena, expected none on a rank that quantizes in the arena");
    int64_t stride = extents_[operand.shape()].bytes;
    const auto begin = static_cast<int64_t>(operand.offset()), end = begin + stride;
    for (uint32_t l = 0; l < shape.loop_count(); ++l) {
      const Loop &loop = *segment_.loops()->Get(shape.first_loop() + l);
      stride /= static_cast<int64_t>(loop.count());
      if (loop.stride() != stride || loop.buffer_step() != 0)
        return fail("is relayed but not contiguous");
    }
    bool right = true;
    relayed_.take(begin, end, step_, [&](uint32_t before) {
      if (!right)
        return;
      if (const bool sent = segment_.steps()->Get(before)->kind() == StepKind::send;
          before == step_ || sent == (step.kind() == StepKind::send) || !waits(step, before))
        right = fail("uses bytes " + range(begin, end) + " of the arena after step " + text(before) +
                     ", expected that step to be a " + (step.kind() == StepKind::send ? "receive" : "send") +
                     " and to be in 'after'");
    });
    return right;
  }

  /// A view that is staged before it is quantized is written only by copies from the head of the arena, by whole rows
  /// of blocks.
  bool stagedRows(const Step &step) {
    for (uint32_t i = 0; i < step.output_count(); ++i) {
      const Operand &output = *segment_.operands()->Get(step.first_output() + i);
      const Buffers &buffers = buffers_.rangeOf(output.buffer());
      const bool fromArena =
          step.kind() == StepKind::copy && segment_.operands()->Get(step.first_input() + i)->buffer() == 0;
      if (fromArena != (buffers.rows > 0))
        return failStep("operand " + text(step.first_output() + i) +
                        (fromArena ? ": is written from the arena, expected only staged elements to be"
                                   : ": is staged before it is quantized, expected it to be copied from the arena"));
      if (!fromArena)
        continue;
      const Shape &shape = *segment_.shapes()->Get(output.shape());
      auto between = [&](int64_t at) { return at % buffers.matrix % buffers.rows == 0; };
      const auto begin = static_cast<int64_t>(output.offset()), end = begin + static_cast<int64_t>(shape.row_bytes());
      if (shape.loop_count() > 0 || !between(begin) || !between(end))
        return failStep("operand " + text(step.first_output() + i) + ": found bytes " + range(begin, end) +
                        ", expected whole rows of blocks of " + text(buffers.rows) + " bytes");
    }
    return true;
  }

  bool pairs(const Step &step) {
    for (uint32_t i = 0; i < step.input_count(); ++i) {
      const uint32_t from = segment_.operands()->Get(step.first_input() + i)->shape();
      const uint32_t to = segment_.operands()->Get(step.first_output() + i)->shape();
      if (from != to && !shapesMatch(segment_, *segment_.shapes()->Get(from), segment_, *segment_.shapes()->Get(to)))
        return failStep("copies input " + text(i) + " of shape " + text(from) + " to an output of shape " + text(to) +
                        ", expected equal rows and loop counts");
    }
    return true;
  }

  /// As OperandCheck::check(), with the step in the error.
  bool operand(uint32_t number, bool output, int64_t &sum) {
    return operand_.check(number, output, sum) || failStep(operand_.error());
  }

  /// Whether the target is a pool, and this is not one of its ranks.
  bool isPassive() const {
    const Endpoint &target = *manifest_.endpoints()->Get(manifest_.endpoints()->size() - 1);
    return target.replicas() > 0 && rank_ < target.ranks()->Get(0);
  }

  const Manifest &manifest_;
  const Segment &segment_;
  const uint32_t rank_;
  const SegmentBuffers &buffers_;
  const std::vector<ShapeExtent> &extents_; // by shape
  OperandCheck operand_;
  uint32_t step_ = 0;
  uint64_t uses_ = 0;                               // operands of the steps so far
  std::vector<std::pair<uint32_t, uint32_t>> sent_; // inputs of sends that have their own: first operand, count
  int64_t chunks_ = 0;                              // the chunks of all messages, counted as for kMaxChunks
  ArenaUse arena_, relayed_;
};

} // namespace

uint64_t arenaHeadBytes(const Segment &segment) {
  uint64_t end = 0;
  for (uint32_t i = 0; segment.operands() && i < segment.operands()->size(); ++i)
    if (const Operand *operand = segment.operands()->Get(i); operand->buffer() == 0) {
      const Shape &shape = *segment.shapes()->Get(operand->shape());
      int64_t last = static_cast<int64_t>(operand->offset() + shape.row_bytes());
      for (uint32_t l = 0; l < shape.loop_count(); ++l)
        last +=
            std::max<int64_t>(0, segment.loops()->Get(shape.first_loop() + l)->stride() *
                                     static_cast<int64_t>(segment.loops()->Get(shape.first_loop() + l)->count() - 1));
      end = std::max(end, static_cast<uint64_t>(last));
    }
  return (end + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
}

bool shapesMatch(const Segment &a, const Shape &x, const Segment &b, const Shape &y) {
  if (x.row_bytes() != y.row_bytes() || x.loop_count() != y.loop_count())
    return false;
  for (uint32_t l = 0; l < x.loop_count(); ++l)
    if (a.loops()->Get(x.first_loop() + l)->count() != b.loops()->Get(y.first_loop() + l)->count())
      return false;
  return true;
}

/// The head of the arena (elements to quantize) and the slots of messages must not overlap.
static Status checkArena(const Segment &segment, uint64_t staged) {
  const uint64_t begin = arenaHeadBytes(segment);
  if (begin > segment.arena_bytes() - staged)
    return badPlan("found an arena of " + text(segment.arena_bytes()) + " bytes, expected " + text(begin + staged) +
                   " or more");
  for (uint32_t s = 0; s < sizeOf(segment.steps()); ++s)
    if (const Step *step = segment.steps()->Get(s);
        (step->kind() == StepKind::send || step->kind() == StepKind::recv) && step->staging() != kInPlace &&
        step->staging() < begin)
      return badPlan("found message " + text(step->message()) + " staged at " + text(step->staging()) + ", expected " +
                     text(begin) + " or more: elements to quantize are staged before");
  return {};
}

Status checkSegment(const Manifest &manifest, const MeshRankIndex &meshRanks, const Segment &segment, uint32_t rank) {
  if (Status status = checkTables(manifest, segment, rank); !status.ok())
    return status;
  SegmentBuffers buffers(manifest, meshRanks, segment, rank);
  if (!buffers.check())
    return badPlan(buffers.error());
  ShapeExtents shapes(segment);
  if (!shapes.check())
    return badPlan(shapes.error());
  StepCheck steps(manifest, segment, rank, buffers, shapes.extents());
  if (!steps.check())
    return badPlan(steps.error());
  return checkArena(segment, buffers.staged());
}

} // namespace reshard
