// SPDX-License-Identifier: Apache-2.0
#include "analysis/verify/alike_ranks.h"

#include "analysis/work_deadline.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>

namespace reshard::analysis {

using namespace schema;

namespace {

void addShape(const Segment &segment, uint32_t number, std::vector<uint64_t> &words) {
  const Shape &shape = *segment.shapes()->Get(number);
  words.insert(words.end(), {shape.row_bytes(), shape.loop_count()});
  for (uint32_t l = 0; l < shape.loop_count(); ++l) {
    const Loop &loop = *segment.loops()->Get(shape.first_loop() + l);
    words.insert(words.end(),
                 {loop.count(), static_cast<uint64_t>(loop.stride()), static_cast<uint64_t>(loop.buffer_step())});
  }
}

} // namespace

std::optional<AlikeRanks::Difference> AlikeRanks::find(uint32_t rank) {
  rank_ = rank;
  described_ = describe(rank, last_);
  if (!described_)
    return std::nullopt;
  digest_ = digestOf(last_.buffers.data(), last_.buffers.size() * sizeof(uint64_t));
  const auto known = known_.find(digest_);
  if (known == known_.end() || !describe(known->second.rank, other_) || other_.buffers != last_.buffers)
    return std::nullopt;
  Difference difference{known->second.rank, known->second.proof, {}, {}};
  constexpr size_t kShare = 4; // proving the differences takes at most a fourth of the time of a whole proof
  const size_t most = last_.written.size() / kShare;
  auto mine = last_.written.begin(), others = other_.written.begin();
  while (mine != last_.written.end() || others != other_.written.end()) {
    const auto order = mine == last_.written.end() ? std::strong_ordering::greater
                       : others == other_.written.end()
                           ? std::strong_ordering::less
                           : std::lexicographical_compare_three_way(
                                 last_.words.begin() + mine->begin, last_.words.begin() + mine->end,
                                 other_.words.begin() + others->begin, other_.words.begin() + others->end);
    if (order < 0)
      difference.outputs.push_back(mine->output);
    else if (order > 0)
      difference.outputsOfOther.push_back(others->output);
    mine += order <= 0;
    others += order >= 0;
    if (difference.outputs.size() + difference.outputsOfOther.size() > most)
      return std::nullopt;
  }
  return difference;
}

void AlikeRanks::keep(const Proof &proof) {
  if (described_)
    known_.try_emplace(digest_, Known{rank_, proof});
}

/// Describes the target buffers of a rank and the outputs that write them. The outputs are in an order that does not
/// depend on when their messages arrive. Returns false for a rank that must be proven by itself.
bool AlikeRanks::describe(uint32_t rank, Description &to) {
  const Segment &segment = paired_.segment(rank);
  to.buffers.clear();
  to.words.clear();
  to.written.clear();
  for (const BufferRange *range : orEmpty(segment.buffers())) {
    if (range->endpoint() == 0)
      continue;
    const Endpoint &endpoint = *manifest_.endpoints()->Get(range->endpoint());
    const Param &param = *endpoint.params()->Get(range->param());
    if (endpoint.storage() || param.view() || param.derived())
      return false;
    to.buffers.insert(to.buffers.end(), {contentOf(rank, *range), range->first(), range->count(), range->bytes()});
  }
  for (uint32_t number = 0; number < orEmpty(segment.steps()).size(); ++number) {
    WorkDeadline::spend(16);
    if (!addStep(rank, number, to))
      return false;
  }
  std::sort(to.written.begin(), to.written.end(), [&](const Written &a, const Written &b) {
    return std::lexicographical_compare(
        to.words.begin() + static_cast<ptrdiff_t>(a.begin), to.words.begin() + static_cast<ptrdiff_t>(a.end),
        to.words.begin() + static_cast<ptrdiff_t>(b.begin), to.words.begin() + static_cast<ptrdiff_t>(b.end));
  });
  return true;
}

/// Adds the outputs of a step. Writes to the arena do not count: only a message that is forwarded from there uses them,
/// and the rank that receives it reads an arena.
bool AlikeRanks::addStep(uint32_t rank, uint32_t number, Description &to) {
  const Segment &segment = paired_.segment(rank);
  const Step &step = *segment.steps()->Get(number);
  if (step.kind() == StepKind::send)
    return true;
  const bool receives = step.kind() == StepKind::recv;
  const uint32_t fromRank = receives ? step.peer() : rank;
  const uint32_t firstInput = receives ? paired_.send(step.message()).first_input() : step.first_input();
  for (uint32_t i = 0; i < step.output_count(); ++i) {
    WorkDeadline::spend(16);
    const Operand &output = *segment.operands()->Get(step.first_output() + i);
    const BufferRange *range = bufferRangeOf(segment, output.buffer());
    if (!range)
      continue;
    if (range->endpoint() == 0)
      return false;
    const size_t begin = to.words.size();
    to.words.insert(to.words.end(), {output.buffer(), output.offset()});
    addShape(segment, output.shape(), to.words);
    if (step.kind() == StepKind::fill)
      to.words.push_back(0); // no content has this number
    else if (!addInput(fromRank, *paired_.segment(fromRank).operands()->Get(firstInput + i), to.words))
      return false;
    to.written.push_back({{number, i}, begin, to.words.size()});
  }
  return true;
}

/// Adds what an operand reads. Returns false if it reads an arena or buffers of several params.
bool AlikeRanks::addInput(uint32_t rank, const Operand &input, Words &words) {
  const Segment &from = paired_.segment(rank);
  const BufferRange *range = bufferRangeOf(from, input.buffer());
  if (!range)
    return false;
  int64_t first = input.buffer(), last = input.buffer();
  const Shape &shape = *from.shapes()->Get(input.shape());
  for (uint32_t l = 0; l < shape.loop_count(); ++l) {
    const Loop &loop = *from.loops()->Get(shape.first_loop() + l);
    (loop.buffer_step() < 0 ? first : last) += static_cast<int64_t>(loop.count() - 1) * loop.buffer_step();
  }
  if (first < range->first() || last >= int64_t{range->first()} + range->count())
    return false;
  words.insert(words.end(), {contentOf(rank, *range), input.buffer() - range->first(), input.offset()});
  addShape(from, input.shape(), words);
  return true;
}

/// A number, at least 1, that is the same for ranges of buffers with the same elements.
uint64_t AlikeRanks::contentOf(uint32_t rank, const BufferRange &range) {
  const auto &ranges = orEmpty(paired_.segment(rank).buffers());
  if (numbers_.size() <= rank)
    numbers_.resize(rank + 1);
  if (numbers_[rank].empty())
    numbers_[rank].resize(ranges.size());
  uint64_t &number = numbers_[rank][static_cast<size_t>(&range - ranges.Get(0))];
  if (number == 0)
    number = contents_.number(range);
  return number;
}

} // namespace reshard::analysis
