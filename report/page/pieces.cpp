// SPDX-License-Identifier: Apache-2.0
#include "report/page/pieces.h"

#include "base/work_deadline.h"
#include "command/common.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>

namespace reshard::report {

using namespace command;
using namespace verify;

using namespace schema;

namespace {

constexpr size_t kPieceBoxes = 16; // drawn for a piece

} // namespace

void DrawnPieces::want(size_t tensor, SideRank to) {
  if (to.endpoint > 0 && known_.emplace(tensor, to).second)
    next_.emplace(tensor, to);
}

Status DrawnPieces::find() {
  while (!next_.empty()) { // each pass wants the ranks that forward to those of the pass before
    wanted_ = std::exchange(next_, {});
    std::set<uint32_t> ranks;
    bool files = false;
    for (const auto &[tensor, to] : wanted_) {
      files = files || plan_.manifest().endpoints()->Get(to.endpoint)->storage();
      ranks.insert(to.number);
    }
    ProgressLine progress("find the pieces");
    for (uint32_t rank = 0; rank < plan_.world(); ++rank) {
      if (Status status = files || ranks.contains(rank) ? read(rank) : Status(); !status.ok()) // any may write a file
        return status;
      progress.at(static_cast<double>(rank + 1) / plan_.world());
    }
  }
  return {};
}

/// The buffers of a rank whose pieces are wanted, and their tensors.
std::map<uint32_t, std::vector<size_t>> DrawnPieces::buffersOf(uint32_t rank) const {
  std::map<uint32_t, std::vector<size_t>> buffers;
  for (const BufferRange *range : orEmpty(paired_.segment(rank).buffers())) {
    const Endpoint &endpoint = *plan_.manifest().endpoints()->Get(range->endpoint());
    const SideRank receiver{range->endpoint(), endpoint.ranks()->Get(range->mesh_rank())};
    for (size_t t = 0; t < tensors_.size() && range->endpoint() > 0; ++t) {
      WorkDeadline::spend(8);
      if (!wanted_.contains({t, receiver}))
        continue;
      if (const auto instance = tensors_[t].instance(endpoint, range->param(), range->mesh_rank()))
        buffers[range->first() + instance->instance].push_back(t);
    }
  }
  return buffers;
}

Status DrawnPieces::read(uint32_t rank) {
  const std::map<uint32_t, std::vector<size_t>> buffers = buffersOf(rank);
  if (buffers.empty())
    return {};
  Status added; // the first error
  const Status moves = staged_.forEachMove(rank, [&](const Move &move) {
    const auto at = buffers.find(move.targetBuffer);
    if (at != buffers.end() && !move.zero && added.ok())
      added = add(rank, move, at->second);
  });
  return added.ok() ? moves : added;
}

SideRank DrawnPieces::sideRankOf(const BufferRange &range) const {
  return {range.endpoint(), plan_.manifest().endpoints()->Get(range.endpoint())->ranks()->Get(range.mesh_rank())};
}

/// Splits a move into elements of the tensors, and adds them to their pieces.
Status DrawnPieces::add(uint32_t rank, const Move &move, const std::vector<size_t> &tensors) {
  const Segment &segment = paired_.segment(rank);
  const BufferRange &range = *bufferRangeOf(segment, move.targetBuffer);
  const int64_t item =
      itemBytes(plan_.manifest().endpoints()->Get(range.endpoint())->params()->Get(range.param())->dtype());
  const BufferRange *source = bufferRangeOf(paired_.segment(move.sourceRank), move.sourceBuffer);
  if (!source)
    return badPlan("rank " + std::to_string(move.sourceRank) +
                   " sends bytes of its arena that no message brought there");
  const PieceRoute route{sideRankOf(*source), sideRankOf(range), move.sourceRank,  rank,
                         move.message,        move.relay,        move.relayMessage};
  if (!contents_.of(segment, move.targetBuffer, held_))
    return badPlan("the layout of rank " + std::to_string(rank) + " has too many fragments to draw");
  NestSplitter splitter(held_.sets(), work_);
  const SplitStatus status = splitter.run(nestOf(move, item), [&](const Fragment &fragment) {
    if (fragment.set->tag == 0)
      return true;
    const TensorNumber tensor = held_.tensor(fragment.set->tag);
    const auto [at, added] = byNumber_.try_emplace(tensor, SIZE_MAX);
    for (size_t t = 0; added && t < tensors_.size(); ++t)
      if (tensors_[t].name() == contents_.name(tensor))
        at->second = t;
    if (std::find(tensors.begin(), tensors.end(), at->second) == tensors.end())
      return true;
    std::vector<Stride> strides;
    uint64_t bytes = static_cast<uint64_t>(item);
    for (const Fragment::Loop &loop : fragment.loops) {
      strides.push_back({loop.count, loop.value});
      bytes *= static_cast<uint64_t>(loop.count);
    }
    DrawnPiece &piece = pieces_[at->second].try_emplace(route, DrawnPiece{0, Boxes(kPieceBoxes)}).first->second;
    piece.bytes += bytes;
    piece.boxes.add(tensors_[at->second].matrix(), fragment.value, std::move(strides));
    want(at->second, route.from); // a target rank that forwards them
    return true;
  });
  if (status != SplitStatus::done)
    return badPlan("the moves to rank " + std::to_string(rank) +
                   " do not match its layout: reshard-inspect --verify names the first wrong byte");
  return {};
}

} // namespace reshard::report
