#include "tools/contents.h"

#include "tools/synthesize.h"
#include "tools/vectors.h"

#include <algorithm>

namespace reshard::tools {

using namespace schema;

namespace {

/// Consecutive elements of one tensor at consecutive places of an instance; tensor 0 is padding.
struct Stretch {
  int64_t local, count;
  uint32_t tensor;
  int64_t logical;
};

/// A box for each choice of a run of each dimension.
bool addBoxes(const Grid &grid, size_t d, Box &box, Boxes &boxes) {
  if (d == grid.dimensions.size())
    return boxes.add(box);
  const Grid::Dimension &dimension = grid.dimensions[d];
  for (const Run &r : dimension.runs) {
    Box one = box;
    one.begin += r.to() * dimension.localStride;
    one.value += r.from() * dimension.logicalStride;
    one.dimensions.push_back({r.count(), r.to_step() * dimension.localStride, r.from_step() * dimension.logicalStride});
    one.dimensions.push_back({r.length(), dimension.localStride, dimension.logicalStride});
    if (!addBoxes(grid, d + 1, one, boxes))
      return false;
  }
  return true;
}

/// Whether boxes stand one behind the other. They are in order.
bool apart(const Boxes &boxes) {
  const auto meets = [](const Box &a, const Box &b) { return b.begin < a.end; };
  return std::adjacent_find(boxes.list().begin(), boxes.list().end(), meets) == boxes.list().end();
}

} // namespace

const BufferRun *runOf(const Segment &segment, uint32_t buffer) {
  const auto &runs = all(segment.buffers());
  auto at =
      std::upper_bound(runs.begin(), runs.end(), buffer, [](uint32_t b, const BufferRun *r) { return b < r->first(); });
  return at == runs.begin() ? nullptr : *--at;
}

std::shared_ptr<const Boxes> Contents::of(const Segment &segment, uint32_t buffer) {
  const BufferRun &run = *runOf(segment, buffer);
  const uint32_t instance = buffer - run.first();
  const Key key{run.endpoint(), likePlace(run), run.param(), instance};
  if (const auto known = known_.find(key); known != known_.end())
    return known->second;
  if (kept_ > kMaxKept) {
    known_.clear();
    kept_ = 0;
  }
  auto boxes = std::make_shared<Boxes>();
  if (!make(run, instance, *boxes))
    return nullptr;
  kept_ += boxes->list().size();
  return known_[key] = std::move(boxes);
}

const std::string &Contents::name(uint32_t tensor) const {
  for (const auto &[name, number] : tensors_)
    if (number == tensor)
      return name;
  return tensors_.begin()->first;
}

const ParamInstance &Contents::instance(const BufferRun &run, uint32_t number) {
  const uint64_t key = (uint64_t{run.endpoint()} << 56) ^ (uint64_t{run.place()} << 28) ^ run.param();
  auto [at, added] = instances_.try_emplace(key);
  if (added) {
    if (instances_.size() > 4096) { // rank by rank, so that a few places are enough
      instances_.clear();
      at = instances_.try_emplace(key).first;
    }
    at->second = instances(manifest_, *manifest_.endpoints()->Get(run.endpoint()), run.param(), run.place());
  }
  return at->second[number];
}

/// The first place seen where a param holds the same: replicas have the same coordinates in all that it depends on.
uint32_t Contents::likePlace(const BufferRun &run) {
  const auto [at, added] = likePlace_.try_emplace({run.endpoint(), run.place(), run.param(), 0}, run.place());
  if (!added)
    return at->second;
  std::vector<int64_t> coordinates = likeness(*manifest_.endpoints()->Get(run.endpoint()), run.param(), run.place());
  coordinates.push_back(run.endpoint());
  return at->second = firstLike_.try_emplace(std::move(coordinates), run.place()).first->second;
}

uint32_t Contents::numberOf(const std::string *tensor) {
  return tensor ? tensors_.try_emplace(*tensor, static_cast<uint32_t>(tensors_.size())).first->second : 0;
}

bool Contents::make(const BufferRun &run, uint32_t number, Boxes &boxes) {
  const Endpoint &endpoint = *manifest_.endpoints()->Get(run.endpoint());
  bool good = true;
  forEachGrid(manifest_, endpoint, run.param(), run.place(), instance(run, number), [&](const Grid &grid) {
    Box box;
    box.tag = numberOf(grid.tensor);
    box.begin = grid.local;
    good = good && addBoxes(grid, 0, box, boxes);
  });
  if (!good)
    return false;
  boxes.finish();
  uint64_t work = 0;
  const int64_t elements = static_cast<int64_t>(run.bytes()) / itemBytes(endpoint.params()->Get(run.param())->dtype());
  return apart(boxes) || boxes.partition(elements, work) || disjoint(run, number, boxes);
}

/// Parts may say the same of an element twice; of parts that contradict each other nothing is left. Layouts of the
/// compiler do neither, so element by element will do.
bool Contents::disjoint(const BufferRun &run, uint32_t number, Boxes &boxes) {
  std::vector<Stretch> sorted;
  bool good = true;
  forEachRun(manifest_, *manifest_.endpoints()->Get(run.endpoint()), run.param(), run.place(), instance(run, number),
             [&](const ElementRun &r) {
               const uint32_t tensor = numberOf(r.tensor);
               const bool whole = r.localStep == 1 && (r.logicalStep == 1 || tensor == 0);
               const int64_t count = whole ? 1 : r.count;
               good = good && sorted.size() + static_cast<uint64_t>(count) <= Boxes::kMost;
               for (int64_t k = 0; good && k < count; ++k)
                 sorted.push_back(
                     {r.local + k * r.localStep, whole ? r.count : 1, tensor, r.logical + k * r.logicalStep});
             });
  boxes = {};
  if (!good)
    return false;
  std::sort(sorted.begin(), sorted.end(), [](const Stretch &a, const Stretch &b) { return a.local < b.local; });
  size_t kept = 0;
  for (Stretch next : sorted) {
    if (kept > 0) {
      const Stretch &back = sorted[kept - 1];
      if (const int64_t shared = std::min(back.local + back.count - next.local, next.count); shared > 0) {
        const bool agree =
            back.tensor == next.tensor && (next.tensor == 0 || next.logical - back.logical == next.local - back.local);
        if (!agree)
          return true;
        next = {next.local + shared, next.count - shared, next.tensor, next.logical + shared};
        if (next.count == 0)
          continue;
      }
    }
    sorted[kept++] = next;
  }
  for (size_t i = 0; i < kept; ++i) {
    Box box{sorted[i].local, sorted[i].tensor == 0 ? 0 : sorted[i].logical, sorted[i].tensor, {}, 0};
    box.dimensions.push_back({sorted[i].count, 1, sorted[i].tensor == 0 ? 0 : 1});
    if (!boxes.add(std::move(box)))
      return false;
  }
  boxes.finish();
  return true;
}

} // namespace reshard::tools
