// SPDX-License-Identifier: Apache-2.0
// Reads the segments of a plan into the ranges that a reader reads from each sender.
#include "report/simulate/pull_ranges.h"

#include "base/work_deadline.h"
#include "executor/memory/chunks.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>

namespace reshard::report {

namespace {

using namespace schema;

/// Whether the bytes of a receive are in memory as they were sent, so that other engine replicas can read them there.
bool servable(const Manifest &manifest, const Segment &segment, const Step &receive) {
  for (uint32_t i = 0; i < receive.output_count(); ++i) {
    const uint32_t buffer = segment.operands()->Get(receive.first_output() + i)->buffer();
    if (buffer == 0)
      return false;
    uint32_t low = 0, high = segment.buffers()->size();
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      (segment.buffers()->Get(middle)->first() <= buffer ? low : high) = middle;
    }
    const BufferRange &range = *segment.buffers()->Get(low);
    const Param &param = *manifest.endpoints()->Get(range.endpoint())->params()->Get(range.param());
    if (!bindable(param) || param.storage_dtype())
      return false;
  }
  return true;
}

/// Reads the segments of a pool's ranks.
class RangeReader {
public:
  RangeReader(const Plan &plan, uint32_t first, std::vector<RankRanges> &ranks)
      : plan_(plan), first_(first), ranks_(ranks), messages_(plan.manifest().messages()) {}

  Status read() {
    if (Status status = checkMessages(plan_); !status.ok())
      return status;
    for (uint32_t rank = 0; rank < plan_.world(); ++rank) { // finds which sends pack
      std::shared_ptr<const Segment> segment;
      if (Status status = plan_.segment(rank, segment); !status.ok())
        return status;
      for (const Step *step : orEmpty(segment->steps()))
        if (step->kind() == StepKind::send)
          messages_[step->message()].packed = step->staging() != UINT64_MAX;
    }
    for (uint32_t meshRank = 0; meshRank < ranks_.size(); ++meshRank)
      if (Status status = receives(meshRank); !status.ok())
        return status;
    for (uint32_t meshRank = 0; meshRank < ranks_.size(); ++meshRank)
      if (Status status = forwards(meshRank); !status.ok())
        return status;
    return {};
  }

private:
  struct Message {
    uint32_t reader = 0, first = 0; // mesh rank; number of its first range in the lane
    Lane lane = kParent;
    bool packed = false;
  };

  /// Adds the ranges that a rank receives.
  Status receives(uint32_t meshRank) {
    std::shared_ptr<const Segment> segment;
    if (Status status = plan_.segment(first_ + meshRank, segment); !status.ok())
      return status;
    RankRanges &rank = ranks_[meshRank];
    std::vector<RangeProgress> done; // by step: what has arrived when it is complete
    for (const Step *step : orEmpty(segment->steps())) {
      WorkDeadline::spend(8 + step->after_count() + step->output_count());
      RangeProgress before, copied; // steps in `after`; copies among them
      for (uint32_t i = 0; i < step->after_count(); ++i) {
        const uint32_t earlier = segment->after()->Get(step->first_after() + i);
        before.include(done[earlier]);
        if (segment->steps()->Get(earlier)->kind() == StepKind::copy)
          copied.include(done[earlier]);
      }
      if (step->kind() == StepKind::recv) {
        addMessage(*segment, *step, meshRank, copied);
        const Message &message = messages_[step->message()];
        before = {};
        before.count[message.lane] = static_cast<uint32_t>(rank.lanes[message.lane].size());
      } else if (step->kind() != StepKind::send) {
        copy(rank, before, step->bytes());
      }
      done.push_back(before);
    }
    return {};
  }

  /// Adds the ranges of a receive, which reuses memory of the arena after `copied`.
  void addMessage(const Segment &segment, const Step &step, uint32_t meshRank, const RangeProgress &copied) {
    Message &message = messages_[step.message()];
    message.reader = meshRank;
    message.lane = step.peer() < first_ ? kParent : kOwn;
    std::vector<PullRange> &lane = ranks_[meshRank].lanes[message.lane];
    message.first = static_cast<uint32_t>(lane.size());
    PullRange range;
    range.sender = step.peer();
    range.packed = message.packed;
    range.bySource = message.lane == kParent && !servable(plan_.manifest(), segment, step);
    range.wanted = copied;
    for (uint64_t begin = 0; begin < step.bytes(); begin += PullRanges::kBytes) {
      range.bytes = static_cast<uint32_t>(std::min(PullRanges::kBytes, step.bytes() - begin));
      range.unpacked = step.staging() != UINT64_MAX ? range.bytes : 0;
      lane.push_back(range);
    }
  }

  /// Adds a copy or fill, which runs when the last range that it waits for arrives.
  static void copy(RankRanges &rank, const RangeProgress &before, uint64_t bytes) {
    const Lane lane = before.count[kOwn] > 0 ? kOwn : kParent;
    if (before.count[lane] > 0)
      rank.lanes[lane][before.count[lane] - 1].unpacked += bytes;
    else
      rank.copiedFirst += bytes;
  }

  /// Sets what must have arrived at a rank before it can serve the ranges that it forwards.
  Status forwards(uint32_t meshRank) {
    std::shared_ptr<const Segment> segment;
    if (Status status = plan_.segment(first_ + meshRank, segment); !status.ok())
      return status;
    std::vector<RangeProgress> done; // as in receives()
    for (const Step *step : orEmpty(segment->steps())) {
      RangeProgress before;
      for (uint32_t i = 0; i < step->after_count(); ++i)
        before.include(done[segment->after()->Get(step->first_after() + i)]);
      if (step->kind() == StepKind::recv)
        before = upTo(*step, step->bytes());
      else if (step->kind() == StepKind::send)
        forward(*segment, *step, done);
      done.push_back(before);
    }
    return {};
  }

  /// The ranges of a receive's first bytes, and all before them.
  RangeProgress upTo(const Step &receive, uint64_t bytes) const {
    const Message &message = messages_[receive.message()];
    RangeProgress result;
    result.count[message.lane] =
        message.first + static_cast<uint32_t>((bytes + PullRanges::kBytes - 1) / PullRanges::kBytes);
    return result;
  }

  void forward(const Segment &segment, const Step &send, const std::vector<RangeProgress> &done) {
    const Message &message = messages_[send.message()];
    std::vector<PullRange> &lane = ranks_[message.reader].lanes[message.lane];
    const std::vector<std::vector<uint64_t>> before = chunksBefore(segment, send);
    for (uint64_t begin = 0, number = message.first; begin < send.bytes(); begin += PullRanges::kBytes, ++number) {
      const uint64_t end = std::min(begin + PullRanges::kBytes, send.bytes());
      const uint64_t chunk = send.chunk() > 0 ? (end - 1) / send.chunk() : 0;
      WorkDeadline::spend(1 + send.after_count());
      for (uint32_t i = 0; i < send.after_count(); ++i) {
        const uint32_t earlier = segment.after()->Get(send.first_after() + i);
        const Step &step = *segment.steps()->Get(earlier);
        if (step.kind() != StepKind::recv)
          lane[number].served.include(done[earlier]);
        else if (before[i][chunk] > 0)
          lane[number].served.include(
              upTo(step, step.chunk() > 0 ? std::min(step.bytes(), before[i][chunk] * step.chunk()) : step.bytes()));
      }
    }
  }

  const Plan &plan_;
  const uint32_t first_;
  std::vector<RankRanges> &ranks_;
  std::vector<Message> messages_;
};

} // namespace

void RangeProgress::include(const RangeProgress &other) {
  for (const Lane lane : {kParent, kOwn})
    count[lane] = std::max(count[lane], other.count[lane]);
}

Result<PullRanges> PullRanges::of(const Plan &plan) {
  const Endpoint &target = *plan.manifest().endpoints()->Get(1);
  PullRanges result;
  result.first_ = target.ranks()->Get(0);
  result.ranks_.resize(target.ranks()->size());
  if (Status status = RangeReader(plan, result.first_, result.ranks_).read(); !status.ok())
    return status;
  return result;
}

} // namespace reshard::report
