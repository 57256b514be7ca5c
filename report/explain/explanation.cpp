// SPDX-License-Identifier: Apache-2.0
// Follows the moves into one target param back to the source buffers, and names for each origin the reason why the plan
// reads it from there.
#include "base/text.h"
#include "base/work_deadline.h"
#include "command/common.h"
#include "report/inspect/inspection.h"
#include "report/inspect/quantized_forms.h"
#include "schema/flatbuffer_vectors.h"
#include "schema/holdings.h"
#include "verify/proof/staged.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <set>

namespace reshard::report {

using namespace command;
using namespace verify;

namespace {

using namespace schema;

constexpr size_t kLines = 4; // sources of a param; the others are counted
constexpr size_t kNamed = 6; // ranks that a line names

std::string sized(uint64_t bytes) { return humanBytes(static_cast<double>(bytes)); }

/// "rank 3", "ranks 0, 4, 8 and 5 others".
std::string listed(const std::vector<uint32_t> &ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kNamed); ++i)
    text += (i ? ", " : "") + std::to_string(ranks[i]);
  return ranks.size() > kNamed ? text + " and " + counted(ranks.size() - kNamed, "other") : text;
}

/// A target param on a mesh rank.
struct TargetInstance {
  std::vector<std::pair<uint32_t, uint32_t>>
      buffers; // rank and buffer; of a file, of each rank that writes a part of it
  const Endpoint *endpoint = nullptr;
  const BufferRange *range = nullptr; // the first rank's
  ParamInstance instance;
};

/// What a param receives on a rank from one source buffer.
struct Origin {
  uint64_t bytes = 0;
  uint32_t rank = 0, buffer = 0, to = 0;
};

class Explanation {
public:
  Explanation(const Plan &plan, const PairedPlan &paired) : plan_(plan), paired_(paired), manifest_(plan.manifest()) {}

  /// The first target param of that name; with `number`, that of this rank or file.
  std::optional<TargetInstance> find(const std::string &name, std::optional<uint32_t> number = std::nullopt) const {
    std::optional<TargetInstance> place;
    for (uint32_t rank = 0; rank < plan_.world(); ++rank)
      for (const BufferRange *range : orEmpty(paired_.segment(rank).buffers())) {
        const Endpoint &endpoint = *manifest_.endpoints()->Get(range->endpoint());
        if (range->endpoint() == 0 || endpoint.params()->Get(range->param())->view() ||
            (number && *number != endpoint.ranks()->Get(range->mesh_rank())))
          continue;
        if (place) { // another rank that writes the same file
          if (range->endpoint() == place->range->endpoint() && range->param() == place->range->param() &&
              range->mesh_rank() == place->range->mesh_rank())
            place->buffers.emplace_back(rank, writtenRange(rank, *range).first() + place->instance.instance);
          continue;
        }
        WorkDeadline::spend(range->count());
        for (ParamInstance &instance : instances(manifest_, endpoint, range->param(), range->mesh_rank()))
          if (!place && instance.name == name)
            place = TargetInstance{{{rank, writtenRange(rank, *range).first() + instance.instance}},
                                   &endpoint,
                                   range,
                                   std::move(instance)};
        if (place && !endpoint.storage())
          return place;
      }
    return place;
  }

  Status print(const TargetInstance &place) {
    readLoads();
    uint64_t zeros = 0;
    std::vector<Origin> origins;
    for (const auto &[rank, buffer] : place.buffers) {
      std::map<std::pair<uint32_t, uint32_t>, uint64_t> found; // by source rank and buffer
      const auto add = [&, wanted = buffer](const Move &move) {
        if (move.targetBuffer == wanted)
          (move.zero ? zeros : found[{move.sourceRank, move.sourceBuffer}]) += move.bytes();
      };
      if (Status status = StagedMoves(plan_, paired_).forEachMove(rank, add); !status.ok())
        return status;
      for (const auto &[from, bytes] : found)
        origins.push_back({bytes, from.first, from.second, rank});
    }
    std::stable_sort(origins.begin(), origins.end(),
                     [](const Origin &a, const Origin &b) { return a.bytes > b.bytes; });
    std::string shape;
    for (const int64_t length : place.instance.shape)
      shape += (shape.empty() ? "" : ", ") + std::to_string(length);
    const Param &param = *place.endpoint->params()->Get(place.range->param());
    std::printf("%s %s: %s %s [%s], %s\n", place.endpoint->role()->c_str(),
                meshRankName(*place.endpoint, place.range->mesh_rank()).c_str(), place.instance.name.c_str(),
                dtypeName(storageDtypeOf(param)), shape.c_str(),
                sized(static_cast<uint64_t>(place.instance.bytes)).c_str());
    for (size_t i = 0; i < std::min(origins.size(), kLines); ++i)
      printOrigin(origins[i]);
    if (origins.size() > kLines) {
      uint64_t rest = 0;
      for (size_t i = kLines; i < origins.size(); ++i)
        rest += origins[i].bytes;
      std::printf("  %s from %s\n", sized(rest).c_str(),
                  counted(origins.size() - kLines, "other source param").c_str());
    }
    if (zeros > 0)
      std::printf("  %s zero padding\n", sized(zeros).c_str());
    if (origins.empty() && zeros == 0)
      std::printf(place.instance.bytes == 0 ? "  it has no elements\n"
                                            : "  no bytes arrive for it: it is computed on this rank\n");
    return {};
  }

private:
  /// The buffers that are written for a param: its own, or those of the quantized view that it is derived from.
  const BufferRange &writtenRange(uint32_t rank, const BufferRange &range) const {
    const std::optional<QuantizedForm> form = quantizedForms(manifest_, range.endpoint())[range.param()];
    for (const BufferRange *other : orEmpty(paired_.segment(rank).buffers()))
      if (form && other->endpoint() == range.endpoint() && other->mesh_rank() == range.mesh_rank() &&
          static_cast<int32_t>(other->param()) == form->view)
        return *other;
    return range;
  }

  /// The bytes that each rank sends.
  void readLoads() {
    for (uint32_t rank = 0; rank < plan_.world(); ++rank) {
      uint64_t sent = 0;
      for (const Step *step : orEmpty(paired_.segment(rank).steps()))
        sent += step->kind() == StepKind::send ? step->bytes() : 0;
      sent_.push_back(sent);
    }
  }

  void printOrigin(const Origin &origin) const {
    const BufferRange *range = nullptr;
    for (const BufferRange *each : orEmpty(paired_.segment(origin.rank).buffers()))
      if (origin.buffer >= each->first() && origin.buffer - each->first() < each->count())
        range = each;
    const Endpoint &source = *manifest_.endpoints()->Get(range ? range->endpoint() : 0);
    std::string name = "the arena";
    if (range)
      name = instances(manifest_, source, range->param(), range->mesh_rank())[origin.buffer - range->first()].name;
    std::printf("  %s from %s%u: %s\n", sized(origin.bytes).c_str(),
                source.storage() ? "files, read by rank " : "rank ", origin.rank, printable(name).c_str());
    if (!range || source.storage())
      return;
    std::printf("    %s\n", reason(origin, sameElements(source, *range)).c_str());
  }

  /// The ranks whose param holds the same elements, and the source rank among them.
  std::vector<uint32_t> sameElements(const Endpoint &source, const BufferRange &range) const {
    const RankClasses classes(source, range.param());
    std::vector<uint32_t> ranks;
    for (const std::vector<uint32_t> &meshRanks : classes.meshRanks())
      if (classes.of(meshRanks[0]) == classes.of(range.mesh_rank()))
        for (const uint32_t meshRank : meshRanks)
          ranks.push_back(source.ranks()->Get(meshRank));
    return ranks;
  }

  std::string reason(const Origin &origin, const std::vector<uint32_t> &ranks) const {
    if (origin.rank == origin.to)
      return "the rank has them itself: a copy";
    std::string text = "no other rank has the same part of this param";
    if (ranks.size() > 1) {
      const uint32_t perNode = manifest_.ranks_per_node();
      auto near = [&](uint32_t rank) { return perNode > 0 && rank / perNode == origin.to / perNode; };
      uint64_t least = UINT64_MAX, most = 0;
      for (const uint32_t rank : ranks) {
        least = std::min(least, sent_[rank]);
        most = std::max(most, sent_[rank]);
      }
      const bool some = std::any_of(ranks.begin(), ranks.end(), near),
                 all = std::all_of(ranks.begin(), ranks.end(), near);
      text = listed(ranks) + " have the same; ";
      if (some && !all && near(origin.rank))
        text += "this one is on the same node";
      else if (least == most)
        text += "each of them sends " + sized(most) + " in all";
      else
        text +=
            "this one sends " + sized(sent_[origin.rank]) + " in all, they send " + sized(least) + " to " + sized(most);
    }
    std::set<uint32_t> senders;
    for (const Step *step : orEmpty(paired_.segment(origin.to).steps()))
      if (step->kind() == StepKind::recv)
        senders.insert(step->peer());
    return senders.contains(origin.rank) ? text : text + "; another rank relays them";
  }

  const Plan &plan_;
  const PairedPlan &paired_;
  const Manifest &manifest_;
  std::vector<uint64_t> sent_; // by rank
};

} // namespace

Status explain(const Plan &plan, const std::string &wanted) {
  PairedPlan paired(plan);
  if (Status status = paired.load(); !status.ok())
    return status;
  Explanation explanation(plan, paired);
  std::optional<TargetInstance> place = explanation.find(wanted);
  const size_t at = wanted.rfind('@');
  if (!place && at != std::string::npos) {
    const std::string number = wanted.substr(at + 1), name = wanted.substr(0, at);
    const bool digits = !number.empty() && number.size() < 10 && std::all_of(number.begin(), number.end(), ::isdigit);
    const uint32_t rank = digits ? static_cast<uint32_t>(std::stoul(number)) : UINT32_MAX;
    uint32_t ranks = plan.world(); // or files
    for (const Endpoint *endpoint : *plan.manifest().endpoints())
      ranks = std::max(ranks, endpoint->storage() ? endpoint->ranks()->size() : 0);
    if (rank >= ranks)
      return invalid("--explain: found rank '" + number + "', expected 0 to " + std::to_string(ranks - 1));
    place = explanation.find(name, rank);
    if (!place)
      return negative("rank " + number + " has no target param '" + name + "'");
  }
  if (!place)
    return negative("no rank has a target param '" + wanted + "'; --param=GLOB lists names");
  return explanation.print(*place);
}

} // namespace reshard::report
