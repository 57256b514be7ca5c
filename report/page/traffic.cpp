// SPDX-License-Identifier: Apache-2.0
// Sums the bytes between groups of ranks, and lists for each cell the patterns and messages with most bytes.
#include "report/page/page.h"

#include "base/work_deadline.h"
#include "command/common.h"
#include "executor/load/load.h"
#include "schema/flatbuffer_vectors.h"
#include "verify/proof/contents.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <map>

namespace reshard::report {

using namespace command;
using namespace verify;

using Json = nlohmann::ordered_json;

namespace {

using namespace schema;

constexpr size_t kListed = 8; // for a cell: the patterns, and the messages or pairs, with most bytes

/// The params of a layout, by number.
class PatternNames {
public:
  uint32_t number(const std::string &name) {
    const auto [at, added] = numbers_.try_emplace(name, static_cast<uint32_t>(names_.size()));
    if (added)
      names_.push_back(name);
    return at->second;
  }
  const std::vector<std::string> &names() const { return names_; }

private:
  std::map<std::string, uint32_t> numbers_;
  std::vector<std::string> names_;
};

/// What a cell of the matrix moves.
struct Traffic {
  uint64_t bytes = 0, messages = 0;
  std::map<uint32_t, uint64_t> patterns; // bytes by param pattern
  /// A message, or a pair of ranks and the number of its messages.
  struct Part {
    uint64_t bytes = 0;
    uint32_t first = 0, second = 0;
    uint64_t messages = 0;
  };
  std::map<std::pair<uint32_t, uint32_t>, Part> parts; // by message, or by pair
};

/// The `kListed` items with most bytes, the first of equal ones first.
template <class Item, class Bytes> std::vector<Item> largest(std::vector<Item> items, Bytes bytes) {
  std::stable_sort(items.begin(), items.end(), [&](const Item &a, const Item &b) { return bytes(a) > bytes(b); });
  items.resize(std::min(items.size(), kListed));
  return items;
}

class Moves {
public:
  Moves(const Plan &plan, uint32_t group)
      : plan_(plan), group_(group), side_((plan.world() + group - 1) / group),
        cells_(static_cast<size_t>(side_) * side_), most_(side_) {}

  Status read() {
    ProgressLine progress("read the plan");
    for (uint32_t rank = 0; rank < plan_.world(); ++rank) {
      std::shared_ptr<const Segment> segment;
      if (Status status = plan_.segment(rank, segment); !status.ok())
        return status;
      std::array<uint64_t, 4> totals = {0, 0, 0, segment->arena_bytes()};
      for (const Step *step : orEmpty(segment->steps())) {
        WorkDeadline::spend(16);
        const bool sends = step->kind() == StepKind::send, receives = step->kind() == StepKind::recv;
        totals[sends ? 0 : receives ? 1 : 2] += step->bytes();
        if (!sends) // a receive stands for its message
          add(receives ? step->peer() : rank, rank, *segment, *step);
      }
      for (size_t k = 0; k < totals.size(); ++k)
        if (auto &[bytes, of] = most_[rank / group_][k]; rank % group_ == 0 || totals[k] > bytes) {
          bytes = totals[k];
          of = rank;
        }
      progress.at(static_cast<double>(rank + 1) / plan_.world());
    }
    return {};
  }

  Json json() const {
    Json cells = Json::array();
    for (size_t i = 0; i < cells_.size(); ++i)
      if (cells_[i].bytes > 0)
        cells.push_back(
            {i / side_, i % side_, cells_[i].bytes, cells_[i].messages, patternsOf(cells_[i]), partsOf(cells_[i])});
    return {{"cells", std::move(cells)}, {"ranks", most_}, {"patterns", patterns_.names()}};
  }

private:
  void add(uint32_t from, uint32_t to, const Segment &segment, const Step &step) {
    Traffic &cell = cells_[static_cast<size_t>(from / group_) * side_ + to / group_];
    const bool message = step.kind() == StepKind::recv;
    cell.bytes += step.bytes();
    cell.messages += message;
    for (uint32_t i = 0; i < step.output_count(); ++i) {
      const Operand &operand = *segment.operands()->Get(step.first_output() + i);
      const Shape &shape = *segment.shapes()->Get(operand.shape());
      uint64_t bytes = shape.row_bytes();
      for (uint32_t l = 0; l < shape.loop_count(); ++l)
        bytes *= segment.loops()->Get(shape.first_loop() + l)->count();
      cell.patterns[patternOf(segment, operand.buffer())] += bytes;
    }
    if (group_ == 1 && !message)
      return; // copies are no messages
    Traffic::Part &part = cell.parts[group_ == 1 ? std::pair(step.message(), 0u) : std::pair(from, to)];
    part.bytes += step.bytes();
    part.messages += message;
    part.first = group_ == 1 ? step.message() : from;
    part.second = group_ == 1 ? step.round() : to;
  }

  uint32_t patternOf(const Segment &segment, uint32_t buffer) {
    const BufferRange *range = bufferRangeOf(segment, buffer);
    return patterns_.number(
        range ? plan_.manifest().endpoints()->Get(range->endpoint())->params()->Get(range->param())->name()->str()
              : "(arena: relayed or staged)");
  }

  static Json patternsOf(const Traffic &cell) {
    Json result = Json::array();
    for (const auto &[pattern, bytes] :
         largest(std::vector<std::pair<uint32_t, uint64_t>>(cell.patterns.begin(), cell.patterns.end()),
                 [](const auto &each) { return each.second; }))
      result.push_back({pattern, bytes});
    return result;
  }

  Json partsOf(const Traffic &cell) const {
    std::vector<Traffic::Part> parts;
    for (const auto &[key, part] : cell.parts)
      parts.push_back(part);
    Json result = Json::array();
    for (const Traffic::Part &part : largest(std::move(parts), [](const auto &each) { return each.bytes; })) {
      Json one = {part.first, part.second, part.bytes};
      if (group_ > 1)
        one.push_back(part.messages);
      result.push_back(std::move(one));
    }
    return result;
  }

  const Plan &plan_;
  const uint32_t group_, side_;
  std::vector<Traffic> cells_;
  std::vector<std::array<std::pair<uint64_t, uint32_t>, 4>> most_; // by group: bytes sent, received, copied, arena
  PatternNames patterns_;
};

} // namespace

Result<Json> trafficOf(const Plan &plan, uint32_t group) {
  Moves moves(plan, group);
  const Status status = moves.read();
  return status.ok() ? Result<Json>(moves.json()) : status;
}

} // namespace reshard::report
