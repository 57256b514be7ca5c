// SPDX-License-Identifier: Apache-2.0
// Compares the cells of wanted elements with each single element of random layouts: its holders, and the ranks that
// want it, with several targets and params.

#include "compiler/transfer/wanted_cells.h"

#include "compiler/pass.h"
#include "tests/compiler/random_module.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <tuple>
#include <vector>

using namespace reshard;
using namespace reshard::ir;

namespace {

/// The pattern, the ranks that hold it, and the ranks that want it: one entry for each position.
using Group = std::tuple<int, std::vector<int32_t>, std::vector<int32_t>>;
using Elements = std::map<Group, int64_t>; // how many

/// The world ranks of an endpoint that hold an element of a pattern, one entry for each of their positions.
std::vector<int32_t> ranksOf(const Endpoint &endpoint, int pattern, const std::vector<int64_t> &element) {
  std::vector<int32_t> result;
  for (int64_t meshRank = 0; meshRank < endpoint.meshRanks(); ++meshRank)
    for (const Param &param : endpoint.params)
      for (const Part &part : param.parts) {
        bool holds = part.pattern == pattern && present(endpoint, param, meshRank);
        for (size_t d = 0; holds && d < element.size(); ++d) {
          const Sharding &sharding = endpoint.shardings[part.dimensions[d].sharding];
          holds = map(sharding.at[coordinate(endpoint, sharding.axes, meshRank)], element[d]) >= 0;
        }
        if (holds)
          result.push_back(endpoint.ranks[meshRank]);
      }
  std::sort(result.begin(), result.end());
  return result;
}

Elements oneByOne(const Layout &layout) {
  Elements result;
  for (int p = 0; p < static_cast<int>(layout.tensorPatterns.size()); ++p) {
    const TensorPattern &pattern = layout.tensorPatterns[p];
    std::vector<int64_t> size;
    for (unsigned variable : pattern.variables)
      size.push_back(layout.variables[variable].size);
    size.insert(size.end(), pattern.shape.begin(), pattern.shape.end());
    std::vector<int64_t> element(size.size());
    for (size_t d = 0; d < size.size();) { // counts through all elements, the first dimension fastest
      std::vector<int32_t> holders = ranksOf(layout.endpoints[0], p, element), wanters;
      holders.erase(std::unique(holders.begin(), holders.end()), holders.end());
      for (size_t e = 1; e < layout.endpoints.size(); ++e)
        if (!layout.endpoints[e].storage) {
          const std::vector<int32_t> ranks = ranksOf(layout.endpoints[e], p, element);
          wanters.insert(wanters.end(), ranks.begin(), ranks.end());
        }
      std::sort(wanters.begin(), wanters.end());
      if (!wanters.empty())
        ++result[{p, std::move(holders), std::move(wanters)}];
      for (d = 0; d < size.size() && ++element[d] == size[d]; ++d)
        element[d] = 0;
    }
  }
  return result;
}

TEST(WantedCells, AreTheElements) {
  const int cases = std::getenv("RESHARD_FULL") ? 3000 : 300;
  int64_t several = 0, compared = 0;
  for (int seed = 0; seed < cases; ++seed) {
    RandomModule random(static_cast<uint64_t>(seed));
    Module module = seed % 3 == 0 ? random.module() : random.severalTargets();
    if (module.layout.endpoints[0].storage)
      continue;
    ASSERT_EQ(toString(findOverlaps(module)), "") << "seed " << seed;
    Elements found;
    forEachWantedCell(module.layout, module.transfers, [&](const WantedCell &cell) {
      std::vector<int32_t> wanters;
      for (const Overlap *overlap : cell.wants)
        for (int32_t meshRank : overlap->targets)
          wanters.push_back(module.layout.endpoints[overlap->endpoint].ranks[meshRank]);
      std::sort(wanters.begin(), wanters.end());
      several += cell.wants.size() > 1;
      found[{cell.pattern, cell.holders, std::move(wanters)}] += cell.elements;
    });
    ASSERT_EQ(found, oneByOne(module.layout)) << "seed " << seed;
    ++compared;
  }
  EXPECT_GT(compared, cases / 2);
  EXPECT_GT(several, cases / 4);
}

} // namespace
