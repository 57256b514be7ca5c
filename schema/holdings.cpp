// SPDX-License-Identifier: Apache-2.0
// The rank classes of params, and the index of holdings, which lists the elements of one mesh rank of each class.
#include "schema/holdings.h"

#include "base/work_deadline.h"
#include "schema/flatbuffer_vectors.h"

#include <set>
#include <unordered_map>

namespace reshard::schema {

RankClasses::RankClasses(const Endpoint &endpoint, uint32_t number)
    : endpoint_(endpoint), param_(*endpoint.params()->Get(number)) {
  std::set<uint32_t> axes;
  const auto add = [&](const flatbuffers::Vector<uint32_t> *more) {
    axes.insert(orEmpty(more).begin(), orEmpty(more).end());
  };
  for (const uint32_t sharding : orEmpty(param_.instances()))
    add(endpoint.shardings()->Get(sharding)->axes());
  for (const Extent *extent : orEmpty(param_.shape()))
    add(extent->axes());
  for (const Part *part : orEmpty(param_.parts()))
    for (const PartDimension *dimension : orEmpty(part->dimensions()))
      add(endpoint.shardings()->Get(dimension->sharding())->axes());
  uint64_t classes = 1;
  for (const uint32_t axis : axes) {
    axes_.push_back({endpoint.axes()->Get(axis)->stride(), endpoint.axes()->Get(axis)->size()});
    if (__builtin_mul_overflow(classes, axes_.back().size, &classes)) { // then each mesh rank is a class of its own
      axes_ = {{1, endpoint.ranks()->size()}};
      break;
    }
  }
}

std::vector<std::vector<uint32_t>> RankClasses::meshRanks() const {
  std::vector<std::vector<uint32_t>> classes;
  std::unordered_map<uint64_t, size_t> numbers; // in `classes`
  for (uint32_t meshRank = 0; meshRank < endpoint_.ranks()->size(); ++meshRank) {
    WorkDeadline::spend(16);
    if (!present(endpoint_, param_, meshRank))
      continue;
    const auto [at, added] = numbers.try_emplace(of(meshRank), classes.size());
    if (added)
      classes.emplace_back();
    classes[at->second].push_back(meshRank);
  }
  return classes;
}

Holdings holdingsOf(const Manifest &manifest, uint32_t number,
                    const std::function<bool(uint32_t param, uint32_t meshRank)> &covers, bool padding) {
  const Endpoint &endpoint = *manifest.endpoints()->Get(number);
  Holdings found;
  const auto add = [&](uint32_t instance, const PartGrid &grid) {
    if ((!grid.tensor && !padding) || grid.elements() == 0)
      return;
    const auto [at, added] =
        found.byName.try_emplace(grid.tensor ? *grid.tensor : "", static_cast<uint32_t>(found.tensors.size()));
    if (added) {
      HeldTensor &tensor = found.tensors.emplace_back(HeldTensor{&at->first, {}, 1, {}});
      if (grid.tensor)
        for (const uint64_t length :
             orEmpty(manifest.tensor_patterns()->Get(static_cast<uint32_t>(grid.pattern))->shape())) {
          tensor.shape.push_back(static_cast<int64_t>(length));
          tensor.elements *= tensor.shape.back();
        }
    }
    found.tensors[at->second].holdings.push_back(static_cast<uint32_t>(found.items.size()));
    const auto rankClass = static_cast<uint32_t>(found.classes.size() - 1);
    Holding &holding = found.items.emplace_back(Holding{rankClass, instance, at->second, grid});
    holding.grid.tensor = grid.tensor ? &at->first : nullptr;
    holding.grid.values = nullptr; // valid during the visit only
  };
  for (uint32_t param = 0; param < orEmpty(endpoint.params()).size(); ++param)
    for (std::vector<uint32_t> &meshRanks : RankClasses(endpoint, param).meshRanks()) {
      std::erase_if(meshRanks, [&](uint32_t meshRank) { return !covers(param, meshRank); });
      if (meshRanks.empty())
        continue;
      const uint32_t first = meshRanks[0];
      found.classes.push_back({param, std::move(meshRanks)});
      for (const ParamInstance &instance : instances(manifest, endpoint, param, first))
        forEachGrid({manifest, endpoint, first, instance}, [&](const PartGrid &grid) { add(instance.instance, grid); });
    }
  return found;
}

std::vector<PartGrid> Holdings::heldEarlier(const Holding &holding) const {
  std::vector<PartGrid> earlier;
  for (const uint32_t other : tensors[holding.tensor].holdings) {
    if (&items[other] == &holding)
      break;
    if (std::optional<PartGrid> both = overlap(holding.grid, items[other].grid))
      earlier.push_back(std::move(*both));
  }
  return earlier;
}

} // namespace reshard::schema
