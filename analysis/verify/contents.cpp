// SPDX-License-Identifier: Apache-2.0
#include "analysis/verify/contents.h"

#include "analysis/layout/element_ranges.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>
#include <set>

namespace reshard::analysis {

using namespace schema;

namespace {

/// Consecutive elements of one tensor at consecutive positions of an instance; tensor 0 is padding.
struct NumberedRange {
  int64_t local, count;
  uint32_t tensor;
  int64_t logical;
};

/// Adds one set for each combination of blocks, one block of each dimension.
bool addSets(const PartGrid &grid, size_t d, RegularSet &set, RegularSets &sets) {
  if (d == grid.dimensions.size())
    return sets.add(set);
  const PartGrid::Dimension &dimension = grid.dimensions[d];
  for (const IndexBlock &r : dimension.blocks) {
    RegularSet one = set;
    one.begin += r.to() * dimension.localStride;
    one.value += r.from() * dimension.logicalStride;
    one.dimensions.push_back({r.count(), r.to_step() * dimension.localStride, r.from_step() * dimension.logicalStride});
    one.dimensions.push_back({r.length(), dimension.localStride, dimension.logicalStride});
    if (!addSets(grid, d + 1, one, sets))
      return false;
  }
  return true;
}

/// Whether sets, which are sorted by begin, do not interleave.
bool separate(const RegularSets &sets) {
  const auto meets = [](const RegularSet &a, const RegularSet &b) { return b.begin < a.end; };
  return std::adjacent_find(sets.list().begin(), sets.list().end(), meets) == sets.list().end();
}

} // namespace

const BufferRange *bufferRangeOf(const Segment &segment, uint32_t buffer) {
  const auto &runs = orEmpty(segment.buffers());
  auto at = std::upper_bound(runs.begin(), runs.end(), buffer,
                             [](uint32_t b, const BufferRange *r) { return b < r->first(); });
  return at == runs.begin() ? nullptr : *--at;
}

Contents::Contents(const Manifest &manifest) : manifest_(manifest) {
  tensors_[""] = 0;
  for (const Endpoint *endpoint : *manifest.endpoints()) {
    firstParams_.push_back(axes_.size());
    for (const Param *param : orEmpty(endpoint->params())) {
      std::set<uint32_t> axes; // as in rankClassKey
      const auto add = [&](const flatbuffers::Vector<uint32_t> *more) {
        axes.insert(orEmpty(more).begin(), orEmpty(more).end());
      };
      for (const Presence *rule : orEmpty(param->presence()))
        axes.insert(rule->axis());
      for (const uint32_t sharding : orEmpty(param->instances()))
        add(endpoint->shardings()->Get(sharding)->axes());
      for (const Extent *extent : orEmpty(param->shape()))
        add(extent->axes());
      for (const Part *part : orEmpty(param->parts()))
        for (const PartDimension *dimension : orEmpty(part->dimensions()))
          add(endpoint->shardings()->Get(dimension->sharding())->axes());
      std::vector<Axis> &all = axes_.emplace_back();
      uint64_t classes = 1;
      for (const uint32_t axis : axes) {
        all.push_back({endpoint->axes()->Get(axis)->stride(), endpoint->axes()->Get(axis)->size()});
        if (__builtin_mul_overflow(classes, all.back().size, &classes)) { // then each mesh rank is a class of its own
          all = {{1, endpoint->ranks()->size()}};
          break;
        }
      }
    }
  }
}

std::shared_ptr<const RegularSets> Contents::of(const Segment &segment, uint32_t buffer, bool kept) {
  const BufferRange &run = *bufferRangeOf(segment, buffer);
  const uint32_t instance = buffer - run.first();
  const Key key{number(run), instance};
  if (last_ && lastKey_ == key)
    return last_;
  if (const auto known = kept ? known_.find(key) : known_.end(); known != known_.end())
    return known->second;
  if (cached_ > kMaxCached) {
    known_.clear();
    cached_ = 0;
  }
  auto sets = std::make_shared<RegularSets>();
  if (!make(run, instance, *sets))
    return nullptr;
  if (!kept) {
    lastKey_ = key;
    return last_ = std::move(sets);
  }
  cached_ += sets->list().size();
  return known_[key] = std::move(sets);
}

ContentNumber Contents::number(const BufferRange &run) const {
  const size_t param = firstParams_[run.endpoint()] + run.param();
  uint64_t rankClass = 0;
  for (const Axis &axis : axes_[param])
    rankClass = rankClass * axis.size + run.mesh_rank() / axis.stride % axis.size;
  return {param + 1, rankClass};
}

size_t Contents::Hash::operator()(const Key &key) const {
  uint64_t hash = key.content.param;
  for (const uint64_t word : {key.content.rankClass, key.instance})
    hash = (hash ^ (hash >> 32)) * 0x9e3779b97f4a7c15 + word;
  return hash ^ (hash >> 32);
}

const std::string &Contents::name(uint32_t tensor) const {
  for (const auto &[name, number] : tensors_)
    if (number == tensor)
      return name;
  return tensors_.begin()->first;
}

const ParamInstance &Contents::instance(const BufferRange &run, uint32_t number) {
  const uint64_t key = (uint64_t{run.endpoint()} << 56) ^ (uint64_t{run.mesh_rank()} << 28) ^ run.param();
  auto [at, added] = instances_.try_emplace(key);
  if (added) {
    if (instances_.size() > 4096) { // the caller goes rank by rank, so a small cache is enough
      instances_.clear();
      at = instances_.try_emplace(key).first;
    }
    at->second = instances(manifest_, *manifest_.endpoints()->Get(run.endpoint()), run.param(), run.mesh_rank());
  }
  return at->second[number];
}

uint32_t Contents::numberOf(const std::string *tensor) {
  return tensor ? tensors_.try_emplace(*tensor, static_cast<uint32_t>(tensors_.size())).first->second : 0;
}

/// An instance without its name, which takes longer to make than all the rest.
ParamInstance Contents::layoutOf(const BufferRange &run, uint32_t number) const {
  const Endpoint &endpoint = *manifest_.endpoints()->Get(run.endpoint());
  const Param &param = *endpoint.params()->Get(run.param());
  ParamInstance instance{};
  instance.param = run.param();
  instance.instance = number;
  instance.shape = localShape(endpoint, param, run.mesh_rank());
  instance.values.resize(orEmpty(param.instances()).size());
  int64_t rest = number;
  for (auto v = static_cast<uint32_t>(instance.values.size()); v-- > 0;) {
    const IndexMap here = indexMap(endpoint, *endpoint.shardings()->Get(param.instances()->Get(v)), run.mesh_rank());
    const int64_t size = here.size(), at = rest % size;
    rest /= size;
    for (const IndexBlock *block = here.begin; block != here.end; ++block)
      for (int64_t repetition = 0; repetition < block->count(); ++repetition)
        if (const int64_t k = at - block->to() - repetition * block->to_step(); k >= 0 && k < block->length())
          instance.values[v] = block->from() + repetition * block->from_step() + k;
  }
  return instance;
}

bool Contents::make(const BufferRange &run, uint32_t number, RegularSets &sets) {
  const Endpoint &endpoint = *manifest_.endpoints()->Get(run.endpoint());
  const ParamInstance instance = layoutOf(run, number);
  bool good = true;
  forEachPartGrid({manifest_, endpoint, run.mesh_rank(), instance}, [&](const PartGrid &grid) {
    RegularSet set;
    set.tag = numberOf(grid.tensor);
    set.begin = grid.local;
    good = good && addSets(grid, 0, set, sets);
  });
  if (!good)
    return false;
  sets.finish();
  uint64_t work = 0;
  const int64_t elements = static_cast<int64_t>(run.bytes()) / itemBytes(endpoint.params()->Get(run.param())->dtype());
  return separate(sets) || sets.partition(elements, work) || disjoint(run, number, sets);
}

/// Makes overlapping parts disjoint, element by element. Parts that contradict each other leave the buffer without
/// contents, so that no plan for them is proven. The compiler writes no overlapping parts, so speed does not matter
/// here.
bool Contents::disjoint(const BufferRange &run, uint32_t number, RegularSets &sets) {
  std::vector<NumberedRange> sorted;
  bool good = true;
  const Endpoint &endpoint = *manifest_.endpoints()->Get(run.endpoint());
  const ParamInstance instance = layoutOf(run, number);
  forEachRange({manifest_, endpoint, run.mesh_rank(), instance}, [&](const ElementRange &r) {
    const uint32_t tensor = numberOf(r.tensor);
    const bool whole = r.localStep == 1 && (r.logicalStep == 1 || tensor == 0);
    const int64_t count = whole ? 1 : r.count;
    good = good && sorted.size() + static_cast<uint64_t>(count) <= RegularSets::kMaxSets;
    for (int64_t k = 0; good && k < count; ++k)
      sorted.push_back({r.local + k * r.localStep, whole ? r.count : 1, tensor, r.logical + k * r.logicalStep});
  });
  sets = {};
  if (!good)
    return false;
  std::sort(sorted.begin(), sorted.end(),
            [](const NumberedRange &a, const NumberedRange &b) { return a.local < b.local; });
  size_t used = 0;
  for (NumberedRange next : sorted) {
    if (used > 0) {
      const NumberedRange &back = sorted[used - 1];
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
    sorted[used++] = next;
  }
  for (size_t i = 0; i < used; ++i) {
    RegularSet set{sorted[i].local, sorted[i].tensor == 0 ? 0 : sorted[i].logical, sorted[i].tensor, {}, 0};
    set.dimensions.push_back({sorted[i].count, 1, sorted[i].tensor == 0 ? 0 : 1});
    if (!sets.add(std::move(set)))
      return false;
  }
  sets.finish();
  return true;
}

} // namespace reshard::analysis
