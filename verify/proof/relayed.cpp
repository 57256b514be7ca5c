// SPDX-License-Identifier: Apache-2.0
#include "verify/proof/relayed.h"

#include "schema/flatbuffer_vectors.h"

#include <algorithm>

namespace reshard::verify {

using namespace schema;

Status RelayedMoves::read(uint32_t rank, const Step &send) {
  const Segment &segment = paired_.segment(rank);
  send_ = nullptr;
  arrivals_.clear();
  sets_ = {};
  const std::string where = "rank " + std::to_string(rank) + ": relayed bytes for rank " + std::to_string(send.peer()) +
                            " in round " + std::to_string(send.round());
  // The ranges of the arena, by output: the loader has checked that relayed messages are contiguous there. One move of
  // an output need not be, if the output is read from several buffers.
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (uint32_t i = 0; i < send.after_count(); ++i) {
    const uint32_t number = segment.after()->Get(send.first_after() + i);
    const Step &step = *segment.steps()->Get(number);
    if (step.kind() != StepKind::recv)
      continue;
    for (uint32_t o = 0; o < step.output_count(); ++o) {
      const Operand &output = *segment.operands()->Get(step.first_output() + o);
      if (output.buffer() != 0)
        continue;
      uint64_t bytes = 0;
      Status status = paired_.forEachMove(rank, number, o, [&](const Move &move) {
        bytes += move.bytes();
        arrivals_.push_back(move);
      });
      if (!status.ok())
        return status;
      ranges.emplace_back(output.offset(), output.offset() + bytes);
    }
  }
  for (size_t m = 0; m < arrivals_.size(); ++m) {
    const Move &move = arrivals_[m];
    RegularSet set{static_cast<int64_t>(move.targetOffset),
                   static_cast<int64_t>(move.sourceOffset),
                   static_cast<uint32_t>(m),
                   {},
                   0};
    for (const Move::Loop &loop : move.loops)
      set.dimensions.push_back({loop.count, loop.target, loop.source});
    set.dimensions.push_back({static_cast<int64_t>(move.rowBytes), 1, 1});
    if (!sets_.add(std::move(set)))
      return failed(where + " have too many fragments to check");
  }
  sets_.finish();
  std::sort(ranges.begin(), ranges.end());
  for (size_t r = 1; r < ranges.size(); ++r)
    if (ranges[r].first < ranges[r - 1].second)
      return failed(where + " are ambiguous: two receives write byte " + std::to_string(ranges[r].first) +
                    " of its arena");
  send_ = &send;
  return {};
}

Status RelayedMoves::resolve(const Move &move, const Step &send, const std::function<void(const Move &)> &visit) {
  if (send_ != &send)
    if (Status status = read(move.sourceRank, send); !status.ok())
      return status;
  LoopNest nest{static_cast<int64_t>(move.sourceOffset), static_cast<int64_t>(move.targetOffset), 0, {}};
  for (const Move::Loop &loop : move.loops)
    nest.loops.push_back({loop.count, loop.source, loop.target, 0});
  nest.loops.push_back({static_cast<int64_t>(move.rowBytes), 1, 1, 0});
  NestSplitter splitter(sets_, work_);
  const SplitStatus split = splitter.run(nest, [&](const Fragment &fragment) {
    const Move &from = arrivals_[fragment.set->tag];
    Move straight{move.targetBuffer, static_cast<uint64_t>(fragment.counterpart), 1, false, from.sourceRank,
                  from.sourceBuffer, static_cast<uint64_t>(fragment.value),       {}};
    straight.message = move.message;
    straight.relay = move.sourceRank;
    straight.relayMessage = from.message;
    auto loop = fragment.loops.begin(); // the innermost
    if (loop != fragment.loops.end() && loop->counterpart == 1 && loop->value == 1)
      straight.rowBytes = static_cast<uint64_t>((loop++)->count);
    for (auto outer = fragment.loops.rbegin(); outer != std::make_reverse_iterator(loop); ++outer)
      straight.loops.push_back({outer->count, outer->counterpart, outer->value});
    visit(straight);
    return true;
  });
  if (split == SplitStatus::done)
    return {};
  return failed("rank " + std::to_string(move.sourceRank) + " sends byte " +
                std::to_string(split == SplitStatus::missing ? splitter.position() : nest.position) +
                " of its arena to rank " + std::to_string(send.peer()) + " in round " + std::to_string(send.round()) +
                (split == SplitStatus::missing ? ", but no receive that the send waits for writes it"
                                               : ", which has too many fragments to check"));
}

} // namespace reshard::verify
