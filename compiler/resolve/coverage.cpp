// SPDX-License-Identifier: Apache-2.0
// A mesh rank holds a product set of a tensor pattern: the product of its shardings' positions along each dimension. If
// a part's axes are independent of each other, the union of its product sets over all mesh ranks is the product of the
// unions along each dimension, one set. Else (axes of different views, a presence rule on an axis of a sharding) there
// is one set for each combination of coordinates. These sets are subtracted from the whole; an element that remains is
// a gap. The result is exact, and its cost depends neither on the number of rows nor, for independent axes, on that of
// ranks.

#include "compiler/resolve/mesh_ranks.h"
#include "compiler/resolve/product_sets.h"
#include "compiler/resolve/steps.h"

#include <algorithm>
#include <map>
#include <string>

namespace reshard {

using ir::IndexBlock;
using ir::IndexMap;

namespace {

constexpr int64_t kMaxWork = 1 << 20; // index blocks that are processed for one tensor pattern

using ParamPart = std::pair<unsigned, unsigned>; // numbers of a param and of one of its parts

/// The elements of a tensor pattern that no part has so far.
struct Rest {
  std::vector<ProductSet> sets;
  bool any = false; // whether a part has an element
  int64_t work = 0; // index blocks processed

  void subtract(const ProductSet &product) {
    if (isEmpty(product))
      return;
    any = true;
    std::vector<ProductSet> left;
    for (const IndexMap &each : product)
      work += runCount(each);
    for (ProductSet &set : sets) {
      for (const IndexMap &each : set)
        work += runCount(each);
      if (work <= kMaxWork)
        reshard::subtract(std::move(set), product, left);
      else
        left.push_back(std::move(set));
    }
    sets = std::move(left);
  }
};

class SourceCoverage {
public:
  SourceCoverage(const ir::Layout &layout, const std::vector<Location> &declaredAt, bool gaps, Diagnostics &diagnostics)
      : layout_(layout), source_(layout.endpoints[0]), declaredAt_(declaredAt), gaps_(gaps), diagnostics_(diagnostics),
        positions_(source_.shardings.size()), unions_(source_.shardings.size()), tooLong_(source_.shardings.size()) {}

  std::vector<bool> run() {
    std::vector<bool> held(layout_.tensorPatterns.size());
    std::vector<std::vector<ParamPart>> parts(layout_.tensorPatterns.size());
    for (unsigned p = 0; p < source_.params.size(); ++p)
      for (unsigned q = 0; q < source_.params[p].parts.size(); ++q)
        if (const int pattern = source_.params[p].parts[q].pattern; pattern >= 0)
          parts[pattern].emplace_back(p, q);
    for (unsigned f = 0; f < parts.size(); ++f)
      held[f] = !parts[f].empty() && check(layout_.tensorPatterns[f], parts[f]);
    return held;
  }

private:
  /// Whether any mesh rank holds an element of the pattern; reports a gap.
  bool check(const ir::TensorPattern &pattern, const std::vector<ParamPart> &parts) {
    ProductSet whole;
    for (const IndexMap &values : pattern.exists)
      whole.push_back(identityOn(values));
    for (int64_t length : pattern.shape)
      whole.push_back(ir::identity(length));
    if (isEmpty(whole))
      return false;

    Rest rest{{whole}};
    tooMuch_ = false;
    for (size_t i = 0; i < parts.size();) {
      const ir::Param &param = source_.params[parts[i].first];
      const ir::Part &part = param.parts[parts[i].second];
      if (productOverMeshRanks(param, part)) {
        ProductSet product;
        for (size_t d = 0; d < part.dimensions.size(); ++d)
          product.push_back(unionOf(part.dimensions[d].sharding, whole[d]));
        rest.subtract(product);
        ++i;
      } else {
        i = subtractByMeshRank(parts, i, rest);
      }
      if (rest.sets.empty())
        return true;
    }
    tooMuch_ = tooMuch_ || rest.work > kMaxWork;
    if (rest.any || tooMuch_)
      report(pattern, whole, rest.sets[0], parts);
    return rest.any || tooMuch_;
  }

  /// Subtracts the sets of part `first` on each mesh rank, together with those of the parts after it of the same param
  /// that are no product either: then the rest of a flat buffer stays small. Returns the next part.
  size_t subtractByMeshRank(const std::vector<ParamPart> &parts, size_t first, Rest &rest) {
    const unsigned p = parts[first].first;
    const ir::Param &param = source_.params[p];
    std::vector<const ir::Part *> together;
    std::vector<unsigned> all;
    size_t next = first;
    for (; next < parts.size() && parts[next].first == p; ++next) {
      const ir::Part &part = param.parts[parts[next].second];
      if (productOverMeshRanks(param, part))
        break;
      together.push_back(&part);
      add(axes(param, part), all);
    }
    for (int64_t meshRank : distinctMeshRanks(source_, std::move(all))) {
      if (!present(source_, param, meshRank) || !mayRead(source_, meshRank) || rest.sets.empty() ||
          rest.work > kMaxWork)
        continue;
      for (const ir::Part *each : together) {
        ProductSet product;
        for (const ir::PartDimension &dimension : each->dimensions) {
          const ir::Sharding &sharding = source_.shardings[dimension.sharding];
          product.push_back(positions(dimension.sharding, coordinate(source_, sharding.axes, meshRank)));
        }
        rest.subtract(product);
      }
    }
    return next;
  }

  static void add(const std::vector<unsigned> &more, std::vector<unsigned> &axes) {
    axes.insert(axes.end(), more.begin(), more.end());
  }

  std::vector<unsigned> axes(const ir::Param &param, const ir::Part &part) const {
    std::vector<unsigned> result;
    for (const ir::PartDimension &dimension : part.dimensions)
      add(source_.shardings[dimension.sharding].axes, result);
    for (const auto *rules : {&param.presence, &source_.authority})
      for (const ir::Presence &rule : *rules)
        result.push_back(rule.axis);
    return result;
  }

  /// Whether the union of a part's sets over all mesh ranks is a product: no axis is used twice and all are
  /// independent.
  bool productOverMeshRanks(const ir::Param &param, const ir::Part &part) const {
    std::vector<unsigned> all = axes(param, part);
    std::sort(all.begin(), all.end());
    return std::adjacent_find(all.begin(), all.end()) == all.end() && independent(source_, all);
  }

  /// The positions of a sharding at a coordinate.
  const IndexMap &positions(unsigned sharding, int64_t coordinate) {
    auto &known = positions_[sharding];
    if (known.empty())
      for (const IndexMap &indexMap : source_.shardings[sharding].at)
        known.push_back(identityOn(indexMap));
    return known[coordinate];
  }

  /// The positions of a sharding over all coordinates, a subset of `domain`.
  const IndexMap &unionOf(unsigned sharding, const IndexMap &domain) {
    tooMuch_ = tooMuch_ || tooLong_[sharding];
    if (unions_[sharding])
      return *unions_[sharding];
    std::vector<const IndexMap *> sets; // adjacent ones differ; their `from` positions count
    int64_t many = 0, total = 0;
    for (const IndexMap &set : source_.shardings[sharding].at) {
      if (!sets.empty() && *sets.back() == set)
        continue;
      sets.push_back(&set);
      total += positionCount(set);
      many += runCount(set);
    }
    // Long periodic lists: disjoint sets that have as many positions as the domain are the domain.
    constexpr int64_t kManyBlocks = 1 << 16;
    if (many > kManyBlocks && total == positionCount(domain) && std::ssize(sets) * std::ssize(sets) <= kMaxWork) {
      bool disjoint = true;
      for (size_t i = 0; i < sets.size() && disjoint; ++i)
        for (size_t j = 0; j < i && disjoint; ++j)
          disjoint = disjointFrom(*sets[i], *sets[j]);
      if (disjoint)
        return unions_[sharding].emplace(domain);
    }
    if (many > 4 * kMaxWork) {
      tooMuch_ = tooLong_[sharding] = true;
      return unions_[sharding].emplace();
    }
    std::vector<std::pair<int64_t, int64_t>> intervals;
    for (const IndexMap *set : sets)
      for (const IndexBlock &s : *set)
        for (int64_t i = 0; i < s.count; ++i)
          intervals.emplace_back(s.from + i * s.fromStep, s.from + i * s.fromStep + s.length);
    std::sort(intervals.begin(), intervals.end());
    IndexMap merged;
    for (const auto &[begin, end] : intervals) {
      if (merged.empty() || merged.back().from + merged.back().length < begin)
        merged.push_back({begin, begin, end - begin, 1, 0, 0});
      else if (IndexBlock &last = merged.back(); last.from + last.length < end)
        last.length = end - last.from;
    }
    return unions_[sharding].emplace(ir::normalize(std::move(merged)));
  }

  void report(const ir::TensorPattern &pattern, const ProductSet &whole, const ProductSet &gap,
              const std::vector<ParamPart> &parts) {
    std::string where;
    for (size_t d = 0; d < gap.size(); ++d) {
      if (sameFrom(gap[d], whole[d]))
        continue;
      const bool variable = d < pattern.variables.size();
      where += (where.empty() ? " " : ", ") + (variable ? layout_.variables[pattern.variables[d]].name : "row") + " " +
               std::to_string(gap[d][0].from) +
               (variable ? "" : " of dimension " + std::to_string(d - pattern.variables.size()));
    }
    std::vector<unsigned> params;
    for (const auto &[p, q] : parts)
      if (params.empty() || params.back() != p)
        params.push_back(p);
    std::string title = "param '" + source_.params[params[0]].name + "'";
    if (params.size() > 1)
      title += " and " + std::to_string(params.size() - 1) + " more";
    const std::string nowhere = std::string(source_.storage ? "in no source file" : "on no source rank") +
                                (source_.authority.empty() ? "" : " that 'authority' allows to be read");
    const std::string message = tooMuch_ ? "cannot check whether the source holds all of tensor '" + pattern.name +
                                               "': " + title + (params.size() > 1 ? " shard" : " shards") +
                                               " it into too many blocks"
                                         : "part of tensor '" + pattern.name + "' is " + nowhere + ": " + title +
                                               (params.size() > 1 ? " omit" : " omits") + where;
    if (gaps_ && !tooMuch_)
      diagnostics_.warning(declaredAt_[params[0]], message);
    else
      diagnostics_.error(declaredAt_[params[0]], message);
  }

  const ir::Layout &layout_;
  const ir::Endpoint &source_;
  const std::vector<Location> &declaredAt_;
  bool gaps_;
  Diagnostics &diagnostics_;
  std::vector<std::vector<IndexMap>> positions_; // by sharding and coordinate
  std::vector<std::optional<IndexMap>> unions_;  // by sharding
  std::vector<bool> tooLong_;                    // shardings whose union was not computed
  bool tooMuch_ = false;                         // the present pattern has more index blocks than are processed
};

} // namespace

std::vector<bool> checkSourceCoverage(const ir::Layout &layout, const std::vector<Location> &declaredAt, bool gaps,
                                      Diagnostics &diagnostics) {
  return SourceCoverage(layout, declaredAt, gaps, diagnostics).run();
}

} // namespace reshard
