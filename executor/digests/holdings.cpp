// SPDX-License-Identifier: Apache-2.0
#include "executor/digests/holdings.h"

#include "schema/flatbuffer_vectors.h"

namespace reshard {

using namespace schema;

namespace {

class Collector {
public:
  Collector(const Manifest &manifest, const Endpoint &endpoint) : manifest_(manifest), endpoint_(endpoint) {}

  Holdings take() {
    for (uint32_t param = 0; param < orEmpty(endpoint_.params()).size(); ++param)
      addParam(param);
    return std::move(found_);
  }

private:
  void addParam(uint32_t number) {
    const Param &param = *endpoint_.params()->Get(number);
    if (param.view())
      return; // its base params are params of their own
    if (transformed(param) || orEmpty(param.parts()).size() == 0) {
      found_.undigested.push_back(number);
      return;
    }
    std::map<std::vector<int64_t>, uint32_t> classes;
    for (uint32_t meshRank = 0; meshRank < endpoint_.ranks()->size(); ++meshRank) {
      if (!present(endpoint_, param, meshRank))
        continue;
      const auto [at, added] =
          classes.try_emplace(rankClassKey(endpoint_, number, meshRank), static_cast<uint32_t>(found_.classes.size()));
      if (added) {
        found_.classes.push_back({number, {}});
        for (const ParamInstance &instance : instances(manifest_, endpoint_, number, meshRank))
          forEachGrid({manifest_, endpoint_, meshRank, instance},
                      [&](const PartGrid &grid) { add(at->second, instance.instance, grid); });
      }
      found_.classes[at->second].meshRanks.push_back(meshRank);
    }
  }

  void add(uint32_t rankClass, uint32_t instance, const PartGrid &grid) {
    if (!grid.tensor || grid.elements() == 0)
      return; // padding
    const auto [at, added] = found_.byName.try_emplace(*grid.tensor, static_cast<uint32_t>(found_.tensors.size()));
    if (added) {
      HeldTensor &tensor =
          found_.tensors.emplace_back(HeldTensor{*grid.tensor, static_cast<uint32_t>(grid.pattern), {}, 1, {}});
      for (const uint64_t length : orEmpty(manifest_.tensor_patterns()->Get(tensor.pattern)->shape())) {
        tensor.shape.push_back(static_cast<int64_t>(length));
        tensor.elements *= tensor.shape.back();
      }
    }
    found_.tensors[at->second].holdings.push_back(static_cast<uint32_t>(found_.items.size()));
    Holding &holding = found_.items.emplace_back(Holding{rankClass, instance, at->second, grid});
    holding.grid.tensor = nullptr;
    holding.grid.values = nullptr; // both are valid during the visit only
  }

  const Manifest &manifest_;
  const Endpoint &endpoint_;
  Holdings found_;
};

} // namespace

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

Holdings holdingsOf(const Manifest &manifest, uint32_t endpoint) {
  return Collector(manifest, *manifest.endpoints()->Get(endpoint)).take();
}

} // namespace reshard
