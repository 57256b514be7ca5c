// SPDX-License-Identifier: Apache-2.0
// Finds by the layouts which tensor elements a buffer holds, as regular sets that buffers of one form have in common.
#include "verify/proof/contents.h"

#include "base/work_deadline.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>

namespace reshard::verify {

using namespace schema;

namespace {

/// Consecutive elements of one tensor at consecutive positions of an instance; tag 0 is padding.
struct TaggedRange {
  int64_t local, count;
  uint32_t tag;
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

/// The strides of a pattern's variables in TensorNumber::values; none if the number could overflow.
std::vector<uint64_t> stridesOf(const Manifest &manifest, const TensorPattern &pattern) {
  std::vector<uint64_t> strides(orEmpty(pattern.variables()).size());
  uint64_t stride = 1;
  for (size_t v = strides.size(); v-- > 0;) {
    strides[v] = stride;
    const uint64_t size = manifest.variables()->Get(pattern.variables()->Get(static_cast<uint32_t>(v)))->size();
    if (__builtin_mul_overflow(stride, std::max<uint64_t>(size, 1), &stride))
      return {};
  }
  return strides;
}

} // namespace

const BufferRange *bufferRangeOf(const Segment &segment, uint32_t buffer) {
  const auto &runs = orEmpty(segment.buffers());
  auto at = std::upper_bound(runs.begin(), runs.end(), buffer,
                             [](uint32_t b, const BufferRange *r) { return b < r->first(); });
  return at == runs.begin() ? nullptr : *--at;
}

Contents::Contents(const Manifest &manifest) : manifest_(manifest) {
  for (const TensorPattern *pattern : orEmpty(manifest.tensor_patterns()))
    strides_.push_back(stridesOf(manifest, *pattern));
  for (const Endpoint *endpoint : *manifest.endpoints()) {
    firstParams_.push_back(layouts_.size());
    for (uint32_t param = 0; param < orEmpty(endpoint->params()).size(); ++param)
      layouts_.push_back(layoutOf(*endpoint, param));
  }
}

Contents::Layout Contents::layoutOf(const Endpoint &endpoint, uint32_t number) const {
  const Param &param = *endpoint.params()->Get(number);
  Layout layout{RankClasses(endpoint, number), {}, {}, true};
  for (const Part *part : orEmpty(param.parts()))
    addTensors(param, *part, layout);
  return layout;
}

/// Adds the first tensor of the next part and its variables that are in the param's name.
void Contents::addTensors(const Param &param, const Part &part, Layout &layout) const {
  const auto number = static_cast<uint32_t>(layout.first.size());
  layout.first.push_back({static_cast<uint32_t>(part.pattern()), 0});
  if (part.pattern() < 0)
    return;
  const TensorPattern &pattern = *manifest_.tensor_patterns()->Get(static_cast<uint32_t>(part.pattern()));
  const std::vector<uint64_t> &strides = strides_[static_cast<size_t>(part.pattern())];
  const auto &variables = orEmpty(pattern.variables());
  layout.numbered = layout.numbered && strides.size() == variables.size();
  for (uint32_t d = 0; layout.numbered && d < variables.size(); ++d)
    for (uint32_t v = 0; v < orEmpty(param.variables()).size() && part.dimensions()->Get(d)->param() < 0; ++v)
      if (param.variables()->Get(v) == variables.Get(d)) {
        layout.named.push_back({number, part.dimensions()->Get(d)->sharding(), v, strides[d]});
        break;
      }
}

bool Contents::of(const Segment &segment, uint32_t buffer, BufferContents &to) {
  const BufferRange &run = *bufferRangeOf(segment, buffer);
  const uint32_t instance = buffer - run.first();
  if (to.range_ == &run && to.instance_ == instance)
    return true;
  to.range_ = nullptr;
  const Layout &layout = layoutOf(run);
  if (!layout.numbered)
    return false;
  const ContentNumber content = number(run);
  key_.assign({content.param, content.rankClass});
  to.first_ = layout.first;
  if (!layout.named.empty()) {
    // An instance whose value a part does not have holds none of its tensors.
    const Endpoint &endpoint = *manifest_.endpoints()->Get(run.endpoint());
    readValues(run, instance);
    key_.resize(2 + (layout.first.size() + 63) / 64, 0);
    to.own_.assign(layout.first.begin(), layout.first.end());
    to.first_ = to.own_;
    for (const Named &named : layout.named) {
      const int64_t value = values_[named.variable];
      to.own_[named.part].values += static_cast<uint64_t>(value) * named.stride;
      if (!indexMap(endpoint, *endpoint.shardings()->Get(named.sharding), run.mesh_rank()).map(value))
        key_[2 + named.part / 64] |= uint64_t{1} << named.part % 64;
    }
  }
  to.instance_ = instance;
  to.form_ = formOf(run, to, false);
  if (to.form_ && to.form_->ownForm) {
    key_.push_back(instance);
    to.form_ = formOf(run, to, true);
  }
  if (to.form_)
    to.range_ = &run;
  return to.form_ != nullptr;
}

/// The form of an instance, whose key is `key_`; null if it does not fit. `own`: it is the form of this instance only.
std::shared_ptr<const ContentForm> Contents::formOf(const BufferRange &run, const BufferContents &of, bool own) {
  if (const auto known = forms_.find(key_); known != forms_.end())
    return known->second;
  if (cached_ > kMaxCached) {
    forms_.clear();
    cached_ = 0;
  }
  auto form = std::make_shared<ContentForm>();
  form->number = ++made_;
  if (!make(run, of, own, *form))
    return nullptr;
  cached_ += 1 + form->sets.list().size();
  return forms_[key_] = std::move(form);
}

ContentNumber Contents::number(const BufferRange &run) const {
  return {firstParams_[run.endpoint()] + run.param() + 1, layoutOf(run).classes.of(run.mesh_rank())};
}
size_t WordsHash::operator()(const Words &words) const {
  uint64_t hash = words.size();
  for (const uint64_t word : words)
    hash = (hash ^ (hash >> 32)) * 0x9e3779b97f4a7c15 + word;
  return hash ^ (hash >> 32);
}

std::string Contents::name(const TensorNumber &tensor) const {
  std::vector<int64_t> values;
  uint64_t rest = tensor.values;
  for (const uint64_t stride : strides_[tensor.pattern]) {
    values.push_back(static_cast<int64_t>(rest / stride));
    rest %= stride;
  }
  return tensorName(manifest_, *manifest_.tensor_patterns()->Get(tensor.pattern), values);
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

/// Sets values_ to the values of an instance: its name takes longer to make than all the rest.
void Contents::readValues(const BufferRange &run, uint32_t number) {
  const Endpoint &endpoint = *manifest_.endpoints()->Get(run.endpoint());
  const Param &param = *endpoint.params()->Get(run.param());
  values_.assign(orEmpty(param.instances()).size(), 0);
  int64_t rest = number;
  for (auto v = static_cast<uint32_t>(values_.size()); v-- > 0;) {
    const IndexMap here = indexMap(endpoint, *endpoint.shardings()->Get(param.instances()->Get(v)), run.mesh_rank());
    const int64_t size = here.size(), at = rest % size;
    rest /= size;
    for (const IndexBlock *block = here.begin; block != here.end; ++block)
      for (int64_t repetition = 0; repetition < block->count(); ++repetition)
        if (const int64_t k = at - block->to() - repetition * block->to_step(); k >= 0 && k < block->length())
          values_[v] = block->from() + repetition * block->from_step() + k;
  }
}

/// Calls visit(tag, grid) for all grids of an instance, and gives each of tensors a tag of its own.
void Contents::forEachTagged(const BufferRange &run, const BufferContents &of, ContentForm &form,
                             const std::function<void(uint32_t, const PartGrid &)> &visit) {
  const Endpoint &endpoint = *manifest_.endpoints()->Get(run.endpoint());
  readValues(run, of.instance_);
  ParamInstance instance{};
  instance.param = run.param();
  instance.instance = of.instance_;
  instance.values = values_;
  instance.shape = localShape(endpoint, *endpoint.params()->Get(run.param()), run.mesh_rank());
  form.tags.assign(1, {});
  forEachCollapsedGrid({manifest_, endpoint, run.mesh_rank(), instance}, [&](const PartGrid &grid) {
    if (grid.pattern < 0)
      return visit(0, grid);
    uint64_t values = 0;
    for (size_t v = 0; v < grid.values->size(); ++v)
      values += static_cast<uint64_t>((*grid.values)[v]) * strides_[static_cast<size_t>(grid.pattern)][v];
    form.tags.push_back({grid.part, values - of.first_[grid.part].values});
    visit(static_cast<uint32_t>(form.tags.size() - 1), grid);
  });
}

bool Contents::make(const BufferRange &run, const BufferContents &of, bool own, ContentForm &form) {
  bool good = true;
  forEachTagged(run, of, form, [&](uint32_t tag, const PartGrid &grid) {
    RegularSet set;
    set.tag = tag;
    set.begin = grid.local;
    good = good && addSets(grid, 0, set, form.sets);
  });
  if (!good)
    return false;
  form.sets.finish();
  uint64_t work = 0;
  const Param &param = *manifest_.endpoints()->Get(run.endpoint())->params()->Get(run.param());
  if (separate(form.sets) || form.sets.partition(static_cast<int64_t>(run.bytes()) / itemBytes(param.dtype()), work))
    return true;
  form.ownForm = true;
  return !own || disjoint(run, of, form);
}

/// Makes overlapping parts disjoint, element by element. Parts that contradict each other leave the buffer without
/// contents, so that no plan for them is proven. The compiler writes no overlapping parts, so speed does not matter
/// here.
bool Contents::disjoint(const BufferRange &run, const BufferContents &of, ContentForm &form) {
  std::vector<TaggedRange> sorted;
  bool good = true;
  forEachTagged(run, of, form, [&](uint32_t tag, const PartGrid &grid) {
    forEachRangeOf(grid, [&](const ElementRange &r) {
      WorkDeadline::spend(r.count);
      const bool whole = r.localStep == 1 && (r.logicalStep == 1 || tag == 0);
      const int64_t count = whole ? 1 : r.count;
      good = good && sorted.size() + static_cast<uint64_t>(count) <= RegularSets::kMaxSets;
      for (int64_t k = 0; good && k < count; ++k)
        sorted.push_back({r.local + k * r.localStep, whole ? r.count : 1, tag, r.logical + k * r.logicalStep});
    });
  });
  form.sets = {};
  if (!good)
    return false;
  std::sort(sorted.begin(), sorted.end(), [](const TaggedRange &a, const TaggedRange &b) { return a.local < b.local; });
  const auto sameTensor = [&](uint32_t a, uint32_t b) {
    const auto number = [&](uint32_t tag) {
      const TensorNumber &first = of.first_[form.tags[tag].part];
      return TensorNumber{first.pattern, first.values + form.tags[tag].values};
    };
    return a == b || (a != 0 && b != 0 && number(a) == number(b));
  };
  size_t used = 0;
  for (TaggedRange next : sorted) {
    if (used > 0) {
      const TaggedRange &back = sorted[used - 1];
      if (const int64_t shared = std::min(back.local + back.count - next.local, next.count); shared > 0) {
        const bool agree =
            sameTensor(back.tag, next.tag) && (next.tag == 0 || next.logical - back.logical == next.local - back.local);
        if (!agree)
          return true;
        next = {next.local + shared, next.count - shared, next.tag, next.logical + shared};
        if (next.count == 0)
          continue;
      }
    }
    sorted[used++] = next;
  }
  for (size_t i = 0; i < used; ++i) {
    RegularSet set{sorted[i].local, sorted[i].tag == 0 ? 0 : sorted[i].logical, sorted[i].tag, {}, 0};
    set.dimensions.push_back({sorted[i].count, 1, sorted[i].tag == 0 ? 0 : 1});
    if (!form.sets.add(std::move(set)))
      return false;
  }
  form.sets.finish();
  return true;
}

} // namespace reshard::verify
