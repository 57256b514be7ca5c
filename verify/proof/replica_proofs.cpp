// SPDX-License-Identifier: Apache-2.0
#include "verify/proof/replica_proofs.h"

#include "base/work_deadline.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>

namespace reshard::verify {

using namespace schema;

std::optional<ReplicaProofs::Difference> ReplicaProofs::find(uint32_t rank) {
  rank_ = rank;
  described_ = describe(rank, last_);
  if (!described_)
    return std::nullopt;
  digest_ = reshard::digestOf(last_.buffers.data(), last_.buffers.size() * sizeof(uint64_t));
  const auto known = known_.find(digest_);
  if (known == known_.end())
    return std::nullopt;
  const size_t mine = last_.written.size(), others = known->second.outputs, most = mine / 4;
  if (std::max(mine, others) - std::min(mine, others) > most || !describeOther(known->second.rank) ||
      other_.buffers != last_.buffers)
    return std::nullopt;
  Difference difference{known->second.rank, known->second.proof, {}, {}};
  for (size_t m = 0, o = 0; m < mine || o < others;) {
    WorkDeadline::spend(1);
    const bool first = o == others || (m < mine && last_.written[m].what < other_.written[o].what);
    if (first) {
      difference.outputs.push_back(last_.written[m++].output);
    } else if (m == mine || other_.written[o].what < last_.written[m].what) {
      difference.outputsOfOther.push_back(other_.written[o++].output);
    } else {
      ++m;
      ++o;
    }
    if (difference.outputs.size() + difference.outputsOfOther.size() > most)
      return std::nullopt;
  }
  return difference;
}

void ReplicaProofs::keep(const Proof &proof) {
  if (described_)
    known_.insert_or_assign(digest_, Known{rank_, last_.written.size(), proof});
}

Digest ReplicaProofs::digestOf(uint32_t rank) const {
  const std::vector<uint64_t> buffers = targetBuffers(rank);
  return reshard::digestOf(buffers.data(), buffers.size() * sizeof(uint64_t));
}

std::vector<uint64_t> ReplicaProofs::targetBuffers(uint32_t rank) const {
  std::vector<uint64_t> buffers;
  for (const BufferRange *range : orEmpty(paired_.segment(rank).buffers()))
    if (range->endpoint() > 0) {
      const ContentNumber content = contents_.number(*range);
      buffers.insert(buffers.end(), {content.param, content.rankClass, range->first(), range->count(), range->bytes()});
    }
  return buffers;
}

/// Most ranks are compared with the one with which the rank before was.
bool ReplicaProofs::describeOther(uint32_t rank) {
  if (otherRank_ == rank)
    return true;
  otherRank_ = describe(rank, other_) ? rank : UINT32_MAX;
  return otherRank_ == rank;
}

/// Describes the target buffers of a rank and the outputs that write them. The order of the outputs does not depend on
/// when their messages arrive. Returns false for a rank that must be proven as a whole.
bool ReplicaProofs::describe(uint32_t rank, Description &to) {
  const Segment &segment = paired_.segment(rank);
  to.written.clear();
  to.buffers = targetBuffers(rank);
  for (const BufferRange *range : orEmpty(segment.buffers())) {
    if (range->endpoint() == 0)
      continue;
    const Endpoint &endpoint = *manifest_.endpoints()->Get(range->endpoint());
    const Param &param = *endpoint.params()->Get(range->param());
    if (endpoint.storage() || param.view() || param.derived())
      return false;
  }
  for (uint32_t number = 0; number < orEmpty(segment.steps()).size(); ++number) {
    WorkDeadline::spend(16);
    if (!addStep(rank, number, to))
      return false;
  }
  WorkDeadline::spend(static_cast<int64_t>(16 * to.written.size()));
  std::sort(to.written.begin(), to.written.end(), [](const Written &a, const Written &b) { return a.what < b.what; });
  return true;
}

/// Adds the outputs of a step. Returns false if one reads an arena. Writes to the arena do not count: only a message
/// that is forwarded from there uses them, and the rank that receives it reads an arena.
bool ReplicaProofs::addStep(uint32_t rank, uint32_t number, Description &to) {
  const Segment &segment = paired_.segment(rank);
  const Step &step = *segment.steps()->Get(number);
  if (step.kind() == StepKind::send)
    return true;
  const bool receives = step.kind() == StepKind::recv;
  const uint32_t fromRank = receives ? step.peer() : rank;
  const Segment &from = paired_.segment(fromRank);
  const uint32_t firstInput = receives ? paired_.send(step.message()).first_input() : step.first_input();
  for (uint32_t i = 0; i < step.output_count(); ++i) {
    WorkDeadline::spend(16);
    const Operand &output = *segment.operands()->Get(step.first_output() + i);
    if (output.buffer() == 0)
      continue;
    Written written{{number, i}, {output.buffer(), output.offset(), shapeOf(rank, output.shape())}};
    if (step.kind() != StepKind::fill) {
      const Operand &input = *from.operands()->Get(firstInput + i);
      const BufferRange *range = bufferRangeOf(from, input.buffer());
      if (!range)
        return false;
      const ContentNumber content = contents_.number(*range);
      written.what[3] = content.param;
      written.what[4] = content.rankClass;
      written.what[5] = input.buffer() - range->first();
      written.what[6] = input.offset();
      written.what[7] = shapeOf(fromRank, input.shape());
    }
    to.written.push_back(written);
  }
  return true;
}

/// A number, at least 1, that is the same for equal shapes.
uint32_t ReplicaProofs::shapeOf(uint32_t rank, uint32_t number) {
  const Segment &segment = paired_.segment(rank);
  shapeNumbers_.resize(std::max<size_t>(shapeNumbers_.size(), rank + 1));
  std::vector<uint32_t> &shapes = shapeNumbers_[rank];
  shapes.resize(segment.shapes()->size());
  if (shapes[number] != 0)
    return shapes[number];
  const Shape &shape = *segment.shapes()->Get(number);
  std::vector<uint64_t> words = {shape.row_bytes()};
  for (uint32_t l = 0; l < shape.loop_count(); ++l) {
    const Loop &loop = *segment.loops()->Get(shape.first_loop() + l);
    words.insert(words.end(),
                 {loop.count(), static_cast<uint64_t>(loop.stride()), static_cast<uint64_t>(loop.buffer_step())});
  }
  return shapes[number] =
             shapes_.try_emplace(std::move(words), static_cast<uint32_t>(shapes_.size() + 1)).first->second;
}

} // namespace reshard::verify
