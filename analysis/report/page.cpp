// SPDX-License-Identifier: Apache-2.0
#include "analysis/report/page.h"

#include "analysis/common.h"
#include "analysis/files/new_folder.h"
#include "analysis/flatbuffer_vectors.h"
#include "analysis/layout/element_ranges.h"
#include "analysis/report/page_text.h"
#include "analysis/simulate/simulate.h"
#include "analysis/work_deadline.h"
#include "executor/load.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>

namespace reshard::analysis {

using Json = nlohmann::ordered_json;

namespace {

using namespace schema;

constexpr size_t kPatterns = 8;           // of a cell: the patterns with most bytes
constexpr size_t kHolders = 64;           // of a tensor: the rank classes of an endpoint that are drawn
constexpr size_t kBoxes = 256;            // of a rank class
constexpr size_t kSpans = 240;            // of a rank in the time line
constexpr uint32_t kSimulatedRanks = 512; // of larger plans only the total time is simulated

/// What a cell of the matrix, or a rank, moves.
struct Traffic {
  uint64_t bytes = 0, messages = 0;
  std::map<uint32_t, uint64_t> patterns; // bytes by param pattern
};

/// The name of a param without its index values, as declared in its layout.
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

/// Who sends to whom, from the steps of all ranks.
class Moves {
public:
  Moves(const Plan &plan, uint32_t group)
      : plan_(plan), group_(group), side_((plan.world() + group - 1) / group),
        cells_(static_cast<size_t>(side_) * side_) {}

  void read() {
    for (uint32_t rank = 0; rank < plan_.world(); ++rank) {
      const Segment *segment = nullptr;
      throwOnError(plan_.segment(rank, segment), kUsage);
      Json totals = {0, 0, 0, segment->arena_bytes()};
      for (const Step *step : orEmpty(segment->steps())) {
        WorkDeadline::spend(16);
        const bool sends = step->kind() == StepKind::send, receives = step->kind() == StepKind::recv;
        totals[sends ? 0 : receives ? 1 : 2] = totals[sends ? 0 : receives ? 1 : 2].get<uint64_t>() + step->bytes();
        if (!sends) // a receive stands for its message
          add(cells_[static_cast<size_t>((receives ? step->peer() : rank) / group_) * side_ + rank / group_], *segment,
              *step);
      }
      ranks_.push_back(std::move(totals));
    }
  }

  /// [from, to, bytes, messages, [[pattern, bytes]]] of each cell that moves something.
  Json cells() const {
    Json result = Json::array();
    for (size_t i = 0; i < cells_.size(); ++i) {
      const Traffic &cell = cells_[i];
      if (cell.bytes == 0)
        continue;
      std::vector<std::pair<uint64_t, uint32_t>> most;
      for (const auto &[pattern, bytes] : cell.patterns)
        most.emplace_back(bytes, pattern);
      std::sort(most.rbegin(), most.rend());
      most.resize(std::min(most.size(), kPatterns));
      Json patterns = Json::array();
      for (const auto &[bytes, pattern] : most)
        patterns.push_back({pattern, bytes});
      result.push_back({i / side_, i % side_, cell.bytes, cell.messages, patterns});
    }
    return result;
  }
  /// [sent, received, copied, arena] of each rank, in bytes.
  const Json &ranks() const { return ranks_; }
  const std::vector<std::string> &patterns() const { return patterns_.names(); }

private:
  void add(Traffic &cell, const Segment &segment, const Step &step) {
    cell.bytes += step.bytes();
    cell.messages += step.kind() == StepKind::recv;
    for (uint32_t i = 0; i < step.output_count(); ++i) {
      const Operand &operand = *segment.operands()->Get(step.first_output() + i);
      const Shape &shape = *segment.shapes()->Get(operand.shape());
      uint64_t bytes = shape.row_bytes();
      for (uint32_t l = 0; l < shape.loop_count(); ++l)
        bytes *= segment.loops()->Get(shape.first_loop() + l)->count();
      cell.patterns[patternOf(segment, operand.buffer())] += bytes;
    }
  }

  uint32_t patternOf(const Segment &segment, uint32_t buffer) {
    for (const BufferRange *range : orEmpty(segment.buffers()))
      if (buffer >= range->first() && buffer - range->first() < range->count())
        return patterns_.number(
            plan_.manifest().endpoints()->Get(range->endpoint())->params()->Get(range->param())->name()->str());
    return patterns_.number("(arena: relayed or staged)");
  }

  const Plan &plan_;
  const uint32_t group_, side_;
  std::vector<Traffic> cells_;
  Json ranks_ = Json::array();
  PatternNames patterns_;
};

/// Which rows and columns of one tensor each rank class of an endpoint holds. A tensor with more dimensions than two is
/// drawn with all but the first joined as its columns.
class Holders {
public:
  Holders(const Manifest &manifest, uint32_t pattern, const std::vector<int64_t> &values)
      : manifest_(manifest), pattern_(pattern), values_(values),
        name_(tensorName(manifest, *manifest.tensor_patterns()->Get(pattern), values)) {
    const auto *shape = manifest.tensor_patterns()->Get(pattern)->shape();
    for (uint32_t d = 0; shape && d < shape->size(); ++d)
      (d == 0 ? rows_ : columns_) *= static_cast<int64_t>(shape->Get(d));
  }

  const std::string &name() const { return name_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }

  /// {holders: [{param, ranks, more, boxes, cut}], left} of an endpoint. left: rank classes that are not drawn; cut:
  /// whether boxes are left out.
  Json of(const Endpoint &endpoint) const {
    Json holders = Json::array();
    size_t left = 0;
    for (uint32_t p = 0; p < orEmpty(endpoint.params()).size(); ++p) {
      const Param &param = *endpoint.params()->Get(p);
      const QuantizedView *view = param.view();
      if ((view && view->kind() != ViewKind::elements) || !holds(param))
        continue;
      const Param &named = view ? *endpoint.params()->Get(view->codes()) : param;
      std::map<std::vector<int64_t>, size_t> classes; // rank class -> entry of `holders`, or none
      for (uint32_t meshRank = 0; meshRank < endpoint.ranks()->size(); ++meshRank) {
        WorkDeadline::spend(64);
        const auto [at, added] = classes.try_emplace(rankClassKey(endpoint, p, meshRank), SIZE_MAX);
        if (!added) {
          if (at->second != SIZE_MAX)
            addRank(holders[at->second], endpoint.ranks()->Get(meshRank));
          continue;
        }
        Boxes boxes = boxesOf(endpoint, p, meshRank);
        if (boxes.list.empty())
          continue;
        if (holders.size() == kHolders) {
          ++left;
          continue;
        }
        at->second = holders.size();
        holders.push_back({{"param", named.name()->str()},
                           {"ranks", {endpoint.ranks()->Get(meshRank)}},
                           {"more", 0},
                           {"boxes", std::move(boxes.list)},
                           {"cut", boxes.cut}});
      }
    }
    return {{"holders", std::move(holders)}, {"left", left}};
  }

private:
  /// Boxes [row, row end, column, column end]; cut: there are more.
  struct Boxes {
    Json list = Json::array();
    bool cut = false;
    bool full() { return cut = cut || list.size() >= kBoxes; }
  };

  static void addRank(Json &entry, uint32_t rank) {
    if (entry["ranks"].size() < 16)
      entry["ranks"].push_back(rank);
    else
      entry["more"] = entry["more"].get<int>() + 1;
  }

  bool holds(const Param &param) const {
    for (const Part *part : orEmpty(param.parts()))
      if (part->pattern() == static_cast<int32_t>(pattern_))
        return true;
    return false;
  }

  /// The boxes that a mesh rank has of the tensor.
  Boxes boxesOf(const Endpoint &endpoint, uint32_t p, uint32_t meshRank) const {
    const Param &param = *endpoint.params()->Get(p);
    Boxes boxes;
    if (rows_ == 0 || columns_ == 0 || instanceCount(endpoint, param, meshRank) == 0)
      return boxes;
    ParamInstance instance;
    instance.param = p;
    instance.shape = localShape(endpoint, param, meshRank);
    const TensorPattern &pattern = *manifest_.tensor_patterns()->Get(pattern_);
    for (uint32_t v = 0; v < orEmpty(param.variables()).size(); ++v) {
      int64_t value = 0;
      for (uint32_t t = 0; t < orEmpty(pattern.variables()).size(); ++t)
        if (pattern.variables()->Get(t) == param.variables()->Get(v))
          value = values_[t];
      const Sharding &sharding = *endpoint.shardings()->Get(param.instances()->Get(v));
      if (!indexMap(endpoint, sharding, meshRank).map(value))
        return boxes;
      instance.values.push_back(value);
    }
    forEachPartGrid({manifest_, endpoint, meshRank, instance}, [&](const PartGrid &grid) {
      if (grid.tensor && *grid.tensor == name_)
        add(grid, 0, 0, 1, boxes);
    });
    return boxes;
  }

  /// Adds the boxes of the dimensions from `d` on, which begin at row-major index `first` of the tensor and repeat in
  /// `rows` rows.
  void add(const PartGrid &grid, size_t d, int64_t first, int64_t rows, Boxes &boxes) const {
    if (d == grid.dimensions.size())
      return addInterval(first, 1, rows, boxes);
    const PartGrid::Dimension &dimension = grid.dimensions[d];
    const int64_t stride = dimension.logicalStride;
    for (const IndexBlock &block : dimension.blocks)
      for (int64_t k = 0; k < block.count(); ++k) {
        const int64_t from = block.from() + k * block.from_step();
        if (stride == columns_ && d + 1 < grid.dimensions.size()) {
          add(grid, d + 1, first + from * stride, block.length(), boxes);
        } else if (d + 1 == grid.dimensions.size() && (stride == 1 || stride == columns_)) {
          addInterval(first + from * stride, block.length() * stride, rows, boxes);
        } else {
          for (int64_t i = 0; i < block.length() && !boxes.cut; ++i)
            add(grid, d + 1, first + (from + i) * stride, rows, boxes);
        }
        if (boxes.cut)
          return;
      }
  }

  /// Adds elements that follow each other, in `rows` rows if they lie in one.
  void addInterval(int64_t begin, int64_t length, int64_t rows, Boxes &boxes) const {
    while (length > 0 && !boxes.full()) {
      const int64_t row = begin / columns_, column = begin % columns_;
      const int64_t whole = column == 0 ? length / columns_ : 0;
      const int64_t width = whole > 0 ? columns_ : std::min(length, columns_ - column);
      const int64_t height = whole > 0 ? std::max(whole, rows) : rows;
      boxes.list.push_back({row, std::min(rows_, row + height), column, column + width});
      const int64_t taken = whole > 0 ? whole * columns_ : width;
      begin += taken;
      length -= taken;
    }
  }

  const Manifest &manifest_;
  const uint32_t pattern_;
  const std::vector<int64_t> values_;
  const std::string name_;
  int64_t rows_ = 1, columns_ = 1;
};

Json tensors(const Manifest &manifest) {
  Json result = Json::array();
  for (uint32_t t = 0; t < orEmpty(manifest.tensor_patterns()).size(); ++t) {
    const TensorPattern &pattern = *manifest.tensor_patterns()->Get(t);
    std::vector<int64_t> values;
    bool exists = true;
    for (const Sharding *sharding : orEmpty(pattern.exists())) {
      const IndexMap map = indexMap(*manifest.endpoints()->Get(0), *sharding, 0);
      exists = exists && map.begin != map.end;
      values.push_back(exists ? map.begin->from() : 0);
    }
    if (!exists)
      continue;
    const Holders holders(manifest, t, values);
    Json sides = Json::array();
    for (const Endpoint *endpoint : *manifest.endpoints())
      sides.push_back(holders.of(*endpoint));
    result.push_back({{"name", pattern.name()->str()},
                      {"example", holders.name()},
                      {"dtype", dtypeName(pattern.dtype())},
                      {"rows", holders.rows()},
                      {"columns", holders.columns()},
                      {"sides", std::move(sides)}});
  }
  return result;
}

/// [[kind, begin, end, peer, bytes]] of a rank; close spans of one kind are joined if there are too many.
Json spansOf(std::vector<const Activity *> activities, double seconds) {
  std::sort(activities.begin(), activities.end(),
            [](const Activity *a, const Activity *b) { return a->begin < b->begin; });
  struct Span {
    int kind;
    double begin, end;
    int32_t peer;
    uint64_t bytes;
  };
  std::vector<Span> spans;
  for (double gap = 0;; gap = gap == 0 ? seconds / 1000 : gap * 2) {
    spans.clear();
    std::map<int, size_t> last; // the last span of each kind
    for (const Activity *activity : activities) {
      const int kind = static_cast<int>(activity->kind);
      const auto at = last.find(kind);
      if (gap > 0 && at != last.end() && activity->begin - spans[at->second].end <= gap) {
        Span &span = spans[at->second];
        span.end = std::max(span.end, activity->end);
        span.bytes += activity->bytes;
        span.peer = span.peer == activity->peer ? span.peer : -1;
      } else {
        last[kind] = spans.size();
        spans.push_back({kind, activity->begin, activity->end, activity->peer, activity->bytes});
      }
    }
    if (spans.size() <= kSpans || gap > seconds)
      break;
  }
  Json result = Json::array();
  for (const Span &span : spans)
    result.push_back({span.kind, span.begin, span.end, span.peer, span.bytes});
  return result;
}

Json timeLine(const Plan &plan, const Topology &topology) {
  const bool activities = plan.world() <= kSimulatedRanks;
  const Result<Simulation> simulated = simulate(plan, topology, activities);
  throwOnError(simulated.status(), kUsage);
  std::map<int32_t, std::vector<const Activity *>> byRank;
  for (const Activity &activity : simulated->activities)
    byRank[activity.rank].push_back(&activity);
  Json lanes = Json::array(), terms = Json::object();
  for (const auto &[rank, own] : byRank)
    if (lanes.size() < kPageRanks)
      lanes.push_back({{"rank", rank}, {"spans", spansOf(own, simulated->seconds)}});
  for (const LowerBoundTerm &term : simulated->lowerBound)
    terms[term.name] = term.seconds;
  return {{"seconds", simulated->seconds},
          {"bound", simulated->lowerBound.empty() ? Json() : Json(simulated->lowerBoundSeconds)},
          {"terms", terms},
          {"lanes", lanes},
          {"ranks", byRank.size()}};
}

Json dataOf(const Plan &plan, const std::optional<Topology> &topology) {
  const Manifest &manifest = plan.manifest();
  // Whole nodes, if the topology says how many ranks a node has.
  const auto upTo = [](uint32_t n, uint32_t by) { return (n + by - 1) / by; };
  const uint32_t node = topology ? static_cast<uint32_t>(std::max<int64_t>(topology->ranksPerNode, 1)) : 1;
  const uint32_t group = plan.world() <= kPageRanks ? 1 : node * upTo(upTo(plan.world(), node), kPageRanks);
  Moves moves(plan, group);
  moves.read();
  const LowerBounds *bounds = manifest.lower_bounds();
  Json endpoints = Json::array();
  for (const Endpoint *endpoint : *manifest.endpoints()) {
    Json axes = Json::array();
    for (const Axis *axis : orEmpty(endpoint->axes()))
      axes.push_back({axis->name()->str(), axis->size()});
    endpoints.push_back({{"role", endpoint->role()->str()},
                         {"layout", endpoint->layout() ? endpoint->layout()->str() : ""},
                         {"storage", endpoint->storage()},
                         {"axes", axes},
                         {"ranks", endpoint->ranks()->size()},
                         {"replicas", endpoint->replicas()}});
  }
  return {{"model", manifest.model() ? manifest.model()->str() : ""},
          {"digest", plan.digest()},
          {"compiler", manifest.compiler() ? manifest.compiler()->str() : ""},
          {"world", plan.world()},
          {"group", group},
          {"transfers", manifest.transfers()},
          {"messages", manifest.messages()},
          {"rounds", manifest.rounds()},
          {"bytes",
           {{"target", manifest.bytes_target()},
            {"local", manifest.bytes_local()},
            {"remote", manifest.bytes_remote()},
            {"storage", manifest.bytes_storage()}}},
          {"endpoints", endpoints},
          {"bounds", bounds ? Json{bounds->rank_egress(), bounds->rank_ingress()} : Json()},
          {"cells", moves.cells()},
          {"ranks", moves.ranks()},
          {"patterns", moves.patterns()},
          {"tensors", tensors(manifest)},
          {"time", topology ? timeLine(plan, *topology) : Json()}};
}

} // namespace

std::string pageOf(const Plan &plan, const std::optional<Topology> &topology) {
  std::string data = dataOf(plan, topology).dump();
  for (size_t at = data.find('<'); at != std::string::npos; at = data.find('<', at))
    data.replace(at, 1, "\\u003c"); // the same text in JSON, and no tag
  std::string page(kPageText);
  constexpr std::string_view kPlace = "\"DATA\"";
  return page.replace(page.find(kPlace), kPlace.size(), data);
}

} // namespace reshard::analysis
