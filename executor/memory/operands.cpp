// SPDX-License-Identifier: Apache-2.0
// Runs the loops of an operand that change the buffer, and makes one strided range of the loops inside a buffer.
#include "executor/memory/operands.h"

#include "executor/memory/bindings.h"

#include "schema/limits.h"

namespace reshard {

using namespace schema;

namespace {

/// A loop of both sides; 0 for a side without an operand.
struct LoopPair {
  uint64_t count = 0;
  int64_t stride[2] = {}, bufferStep[2] = {};
};

/// A pair of operands with equal shapes; [0] is the source, [1] the target.
class OperandPair {
public:
  OperandPair(const Side &source, const Side &target) : sides_{source, target} {
    for (int s = 0; s < 2; ++s)
      if (sides_[s].operand)
        shapes_[s] = sides_[s].rank->segment->shapes()->Get(sides_[s].operand->shape());
  }

  Status expand(Expansion &expansion) {
    if (!shapes_[0] && !shapes_[1])
      return failed("found a pair of operands without a source and without a target, expected one of them");
    if (Status status = pairLoops(); !status.ok())
      return status;
    setShape(expansion.shape);
    for (int s = 0; s < 2; ++s)
      if (sides_[s].operand)
        forms_[s] = sides_[s].rank->form(sides_[s].operand->buffer());
    if (forms_[0].kind == kernels::StorageForm::Kind::cast && shapes_[1])
      return failed("rank " + std::to_string(sides_[0].rank->rank) +
                    " copies from a buffer that is cast, which is not supported");
    setForms(expansion);
    addAddresses(expansion);
    return {};
  }

private:
  const Shape &known() const { return *(shapes_[1] ? shapes_[1] : shapes_[0]); }
  const Loop *loop(int side, uint32_t number) const {
    return shapes_[side] ? sides_[side].rank->segment->loops()->Get(shapes_[side]->first_loop() + number) : nullptr;
  }

  /// "rank 0 has 4 × 8 × 64 bytes"
  std::string describe(int side) const {
    std::string text = "rank " + std::to_string(sides_[side].rank->rank) + " has ";
    for (uint32_t l = 0; l < shapes_[side]->loop_count(); ++l)
      text += std::to_string(loop(side, l)->count()) + " × ";
    return text + std::to_string(shapes_[side]->row_bytes()) + " bytes";
  }
  Status mismatch() const {
    return failed("operand shapes differ: " + describe(0) + ", " + describe(1) + ", expected equal ones");
  }

  /// Sets loops_ and outer_. A side without an operand is packed: its bytes are contiguous.
  Status pairLoops() {
    const bool both = shapes_[0] && shapes_[1];
    if (both &&
        (shapes_[0]->row_bytes() != shapes_[1]->row_bytes() || shapes_[0]->loop_count() != shapes_[1]->loop_count()))
      return mismatch();
    auto packed = static_cast<int64_t>(known().row_bytes());
    for (uint32_t l = known().loop_count(); l-- > 0;) {
      LoopPair &pair = loops_[l];
      if (both && loop(0, l)->count() != loop(1, l)->count())
        return mismatch();
      for (int s = 0; s < 2; ++s) {
        const Loop *own = loop(s, l);
        pair.count = own ? own->count() : pair.count;
        pair.stride[s] = own ? own->stride() : packed;
        pair.bufferStep[s] = own ? own->buffer_step() : 0;
      }
      packed *= static_cast<int64_t>(pair.count);
      if (outer_ == 0 && (pair.bufferStep[0] != 0 || pair.bufferStep[1] != 0))
        outer_ = l + 1;
    }
    return {};
  }

  /// The loops that change no buffer become loops of a strided range. The others are run here, with one range for each
  /// iteration.
  void setShape(kernels::Strided &shape) {
    shape.rowBytes = known().row_bytes();
    shape.loopCount = 0;
    for (uint32_t l = 0; l < known().loop_count(); ++l)
      if (l < outer_)
        ranges_ *= loops_[l].count;
      else
        shape.loops[shape.loopCount++] = {loops_[l].count, loops_[l].stride[0], loops_[l].stride[1]};
    kernels::simplify(shape);
  }

  /// Offsets and strides of a plan count bytes as sent; scales them to the storage form of each side's memory.
  void setForms(Expansion &expansion) const {
    expansion.source = forms_[0];
    expansion.target = forms_[1];
    for (size_t l = 0; l < expansion.shape.loopCount; ++l) {
      kernels::Loop &loop = expansion.shape.loops[l];
      loop.sourceStride = forms_[0].scale(loop.sourceStride);
      loop.targetStride = forms_[1].scale(loop.targetStride);
    }
  }

  void addAddresses(Expansion &expansion) const {
    expansion.at.clear();
    expansion.at.reserve(ranges_);
    for (uint64_t n = 0; n < ranges_; ++n) {
      const auto [source, from] = address(0, n);
      const auto [target, to] = address(1, n);
      expansion.at.push_back({source, target, from, to});
    }
  }

  /// The first byte of range `number` on a side, and the base of its quantized view; null if there is none.
  std::pair<std::byte *, const kernels::ViewBase *> address(int side, uint64_t number) const {
    const auto &[rank, operand] = sides_[side];
    if (!operand)
      return {};
    int64_t buffer = operand->buffer(), offset = static_cast<int64_t>(operand->offset());
    for (size_t l = outer_; l-- > 0; number /= loops_[l].count) {
      const auto i = static_cast<int64_t>(number % loops_[l].count);
      buffer += i * loops_[l].bufferStep[side];
      offset += i * loops_[l].stride[side];
    }
    std::byte *memory = rank->pointer(static_cast<uint32_t>(buffer));
    return {memory ? memory + forms_[side].scale(offset) : nullptr,
            forms_[side] ? rank->viewBase(static_cast<uint32_t>(buffer)) : nullptr};
  }

  const Side sides_[2];
  const Shape *shapes_[2] = {};
  kernels::StorageForm forms_[2];
  LoopPair loops_[schema::kMaxLoops];
  size_t outer_ = 0;    // loops before it are run here: those down to the innermost that changes a buffer
  uint64_t ranges_ = 1; // strided ranges: iterations of these loops
};

} // namespace

Status expand(const Side &source, const Side &target, Expansion &expansion) {
  return OperandPair(source, target).expand(expansion);
}

void castZeros(Expansion &expansion) {
  if (expansion.target.kind != kernels::StorageForm::Kind::cast)
    return;
  expansion.shape.rowBytes =
      static_cast<uint64_t>(expansion.target.scale(static_cast<int64_t>(expansion.shape.rowBytes)));
  expansion.target = {};
}

Status checkBound(const Plan &plan, const LocalRank &rank) {
  const Segment &segment = *rank.segment;
  auto check = [&](uint32_t first, uint32_t count) -> Status {
    Expansion expansion;
    for (uint32_t i = first; i < first + count; ++i) {
      const Operand &operand = *segment.operands()->Get(i);
      if (Status status = expand({&rank, &operand}, {}, expansion); !status.ok())
        return status;
      if (std::all_of(expansion.at.begin(), expansion.at.end(), [](const auto &at) { return at.source; }))
        continue;
      const size_t range = bufferRangeOf(segment, operand.buffer());
      if (range == segment.buffers()->size())
        return badBinding("rank " + std::to_string(rank.rank) + " uses a buffer that was not bound");
      const BufferRange &of = *segment.buffers()->Get(static_cast<uint32_t>(range));
      const Endpoint &endpoint = *plan.manifest().endpoints()->Get(of.endpoint());
      return badBinding(endpoint.role()->str() + " " + meshRankText(endpoint, endpoint.ranks()->Get(of.mesh_rank())) +
                        " param '" + endpoint.params()->Get(of.param())->name()->str() +
                        "': not all instances are bound" + unboundText(plan, of, rank.memory[range]));
    }
    return {};
  };
  for (const Step *step : *segment.steps()) {
    if (Status status = check(step->first_input(), step->input_count()); !status.ok())
      return status;
    if (Status status = check(step->first_output(), step->output_count()); !status.ok())
      return status;
  }
  return {};
}

Status addCopy(const Side &source, const Side &target, Tables &tables) {
  Expansion expansion;
  if (Status status = expand(source, target, expansion); !status.ok())
    return status;
  if (!source.operand)
    castZeros(expansion);
  for (const auto &[from, to, sourceBase, targetBase] : expansion.at) {
    if (!to || (source.operand && !from))
      return failed("rank " + std::to_string(to ? source.rank->rank : target.rank->rank) +
                    " uses a buffer that was not bound");
    const auto there = reinterpret_cast<uint64_t>(to), here = source.operand ? reinterpret_cast<uint64_t>(from) : 0;
    if (const kernels::Conversion conversion{expansion.source, expansion.target, sourceBase, targetBase})
      tables.conversions.add(there, here, expansion.shape, conversion, {0, expansion.shape.bytes()});
    else
      tables.copies.add(there, here, expansion.shape);
  }
  return {};
}

} // namespace reshard
