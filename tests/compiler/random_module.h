// SPDX-License-Identifier: Apache-2.0
// Random layouts of one to three tensor patterns on two meshes, for tests of the passes.
#pragma once

#include "compiler/pass.h"
#include "ir/ir.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace reshard::ir {

class RandomModule {
public:
  /// Every seventh seed has files as its source, every second one slow NICs.
  explicit RandomModule(uint64_t seed) : random_(seed), files_(seed % 7 == 0), slow_(seed % 2 == 0) {}

  Module module() {
    Module module;
    Layout &layout = module.layout;
    layout.variables = {{"layer", pick(1, 5)}, {"expert", pick(1, 4)}};
    layout.topology.ranksPerNode = pick(0, 3);
    layout.stagingLimit = pick(0, 1) ? 0 : 2048 * pick(1, 3);
    if (slow_) {
      layout.topology.nicRate = 1'000'000; // relays then pay even for few bytes
      layout.topology.nicLatency = 1;
    }
    const int tensorPatterns = pick(1, 3);
    for (int f = 0; f < tensorPatterns; ++f) {
      TensorPattern pattern;
      pattern.name = "t" + std::to_string(f);
      for (unsigned v = 0; v < 2; ++v)
        if (pick(0, 1)) {
          pattern.variables.push_back(v);
          pattern.name += ".{" + layout.variables[v].name + "}";
          pattern.exists.push_back(identity(layout.variables[v].size));
        }
      for (int d = pick(1, 2); d > 0; --d)
        pattern.shape.push_back(pick(1, 24));
      pattern.dtype = pick(0, 1) ? DType::bf16 : DType::fp32;
      layout.tensorPatterns.push_back(pattern);
    }
    layout.endpoints.push_back(endpoint(layout, "source", true));
    layout.endpoints.push_back(endpoint(layout, "target", false));
    if (files_) {
      layout.endpoints[0].storage = true;
      for (size_t meshRank = 0; meshRank < layout.endpoints[0].ranks.size(); ++meshRank)
        layout.endpoints[0].ranks[meshRank] = static_cast<int32_t>(meshRank);
    }
    for (const Endpoint &endpoint : layout.endpoints)
      for (int32_t rank : endpoint.storage ? std::vector<int32_t>() : endpoint.ranks)
        layout.world = std::max<int64_t>(layout.world, rank + 1);
    return module;
  }

  /// A job with one or two more targets: on equal, nested, overlapping or other ranks, or in files. If files are read
  /// or written, with a random exchange, and in some jobs with Megatron-Core's assignment.
  Module severalTargets() {
    Module module = this->module();
    Layout &layout = module.layout;
    for (int more = pick(1, 2); more > 0; --more) {
      Endpoint target = pick(0, 1) ? layout.endpoints.back() : endpoint(layout, "", false);
      const auto meshRanks = static_cast<int32_t>(target.ranks.size());
      target.storage = pick(0, 3) == 0;
      if (target.storage) {
        std::iota(target.ranks.begin(), target.ranks.end(), 0);
      } else {
        const std::vector<int32_t> &like = layout.endpoints[static_cast<size_t>(pick(0, 1))].ranks;
        for (int32_t i = 0; i < meshRanks; ++i) // those of another endpoint, or others
          target.ranks[i] = i < std::ssize(like) && pick(0, 2) ? like[i] : 30 + i;
      }
      layout.endpoints.push_back(std::move(target));
    }
    bool writes = false;
    for (size_t e = 1; e < layout.endpoints.size(); ++e) {
      layout.endpoints[e].role = "target." + std::to_string(e - 1);
      writes = writes || layout.endpoints[e].storage;
      for (int32_t rank : layout.endpoints[e].storage ? std::vector<int32_t>() : layout.endpoints[e].ranks)
        layout.world = std::max<int64_t>(layout.world, rank + 1);
    }
    layout.files.exchange = static_cast<Exchange>(pick(0, 4));
    layout.files.megatron = (files_ || writes) && pick(0, 1);
    return module;
  }

  /// A job that folds copies, if both sides have any: without files and nodes, on ranks that the sides do not share,
  /// and with one more axis of each mesh along which all ranks hold the same elements.
  Module copies() {
    files_ = false;
    Module module = this->module();
    Layout &layout = module.layout;
    layout.topology.ranksPerNode = 0;
    layout.foldsCopies = true;
    layout.world = 0;
    for (Endpoint &endpoint : layout.endpoints) {
      const int64_t size = pick(1, 4), meshRanks = endpoint.meshRanks();
      const bool innermost = pick(0, 1);
      for (Axis &axis : endpoint.axes)
        axis.stride *= innermost ? size : 1;
      endpoint.axes.push_back({"copy", size, innermost ? 1 : meshRanks});
      endpoint.ranks.resize(static_cast<size_t>(meshRanks * size));
      for (int32_t &rank : endpoint.ranks)
        rank = static_cast<int32_t>(layout.world++);
      std::shuffle(endpoint.ranks.begin(), endpoint.ranks.end(), random_);
    }
    return module;
  }

private:
  int pick(int least, int most) { return std::uniform_int_distribution<int>(least, most)(random_); }

  /// A random sharding of n rows over `axes`: contiguous and uneven, or block cyclic; whole if there is one coordinate.
  unsigned sharding(Endpoint &endpoint, int64_t n, std::vector<unsigned> axes) {
    Sharding sharding;
    sharding.axes = std::move(axes);
    int64_t k = 1;
    for (unsigned axis : sharding.axes)
      k *= endpoint.axes[axis].size;
    if (k == 1) {
      sharding.axes.clear();
      sharding.at = {identity(n)};
    } else if (pick(0, 1)) { // contiguous, uneven
      std::vector<int64_t> cuts = {0, n};
      for (int64_t i = 1; i < k; ++i)
        cuts.push_back(pick(0, static_cast<int>(n)));
      std::sort(cuts.begin(), cuts.end());
      for (int64_t i = 0; i < k; ++i)
        sharding.at.push_back(normalize({{cuts[i], 0, cuts[i + 1] - cuts[i], 1, 0, 0}}));
    } else { // block cyclic
      const int64_t block = pick(1, 3);
      for (int64_t i = 0; i < k; ++i) {
        IndexMap indexMap;
        int64_t local = 0;
        for (int64_t at = i * block; at < n; at += k * block) {
          const int64_t length = std::min(block, n - at);
          indexMap.push_back({at, local, length, 1, 0, 0});
          local += length;
        }
        sharding.at.push_back(normalize(indexMap));
      }
    }
    endpoint.shardings.push_back(sharding);
    return static_cast<unsigned>(endpoint.shardings.size() - 1);
  }

  /// Takes random axes from `left`.
  std::vector<unsigned> someAxes(std::vector<unsigned> &left) {
    std::vector<unsigned> axes;
    while (!left.empty() && pick(0, 2) == 0) {
      axes.push_back(left.back());
      left.pop_back();
    }
    return axes;
  }

  Endpoint endpoint(const Layout &layout, const char *role, bool source) {
    Endpoint endpoint;
    endpoint.role = role;
    int64_t meshRanks = 1;
    for (const char *axis : {"a", "b", "c"}) {
      const int64_t size = pick(1, 3);
      endpoint.axes.push_back({axis, size, meshRanks});
      meshRanks *= size;
    }
    std::vector<int32_t> ranks(30);
    for (int32_t r = 0; r < 30; ++r)
      ranks[r] = r;
    if (pick(0, 1))
      std::shuffle(ranks.begin(), ranks.end(), random_);
    const int offset = pick(0, 3);
    for (int64_t p = 0; p < meshRanks; ++p)
      endpoint.ranks.push_back(ranks[offset + p > 29 ? p : offset + p]);
    std::vector<unsigned> axes = {0, 1, 2};
    std::shuffle(axes.begin(), axes.end(), random_);
    for (const IndexVariable &variable : layout.variables)
      endpoint.placement.push_back(
          sharding(endpoint, variable.size, pick(0, 1) ? someAxes(axes) : std::vector<unsigned>{}));
    for (unsigned f = 0; f < layout.tensorPatterns.size(); ++f)
      for (int copies = source ? pick(1, 2) : pick(0, 2); copies > 0; --copies)
        endpoint.params.push_back(param(layout, endpoint, f, axes, copies));
    return endpoint;
  }

  /// Param `number` of tensor pattern f: its dimensions permuted, its index variables in the name or one of them
  /// stacked.
  Param param(const Layout &layout, Endpoint &endpoint, unsigned f, std::vector<unsigned> axes, int number) {
    const TensorPattern &pattern = layout.tensorPatterns[f];
    Param param;
    param.name = "p" + std::to_string(f) + "." + std::to_string(number);
    param.dtype = pattern.dtype;
    Part part;
    part.pattern = static_cast<int>(f);
    int stacked = -1;
    std::vector<unsigned> order;
    for (unsigned v : pattern.variables)
      if (stacked < 0 && pick(0, 2) == 0)
        stacked = static_cast<int>(v);
      else
        order.push_back(v);
    std::shuffle(order.begin(), order.end(), random_);
    auto dense = [&](unsigned v) {
      Sharding values = endpoint.shardings[endpoint.placement[v]];
      for (IndexMap &indexMap : values.at)
        indexMap = ir::dense(indexMap);
      endpoint.shardings.push_back(values);
      return static_cast<unsigned>(endpoint.shardings.size() - 1);
    };
    std::map<unsigned, unsigned> dense_;
    for (unsigned v : pattern.variables)
      dense_[v] = dense(v);
    for (unsigned v : order) {
      param.variables.push_back(v);
      param.instances.push_back(dense_[v]);
      param.name += ".{" + layout.variables[v].name + "}";
    }
    auto extent = [&](unsigned sharding) {
      Extent extent{endpoint.shardings[sharding].axes, {}};
      for (const IndexMap &indexMap : endpoint.shardings[sharding].at)
        extent.at.push_back(positionCount(indexMap));
      return extent;
    };
    int next = 0;
    if (stacked >= 0) {
      param.shape.push_back(extent(dense_[stacked]));
      ++next;
    }
    for (unsigned v : pattern.variables)
      part.dimensions.push_back({dense_[v], static_cast<int>(v) == stacked ? 0 : -1});
    std::vector<int> permutation(pattern.shape.size());
    for (size_t d = 0; d < permutation.size(); ++d)
      permutation[d] = next + static_cast<int>(d);
    std::shuffle(permutation.begin(), permutation.end(), random_);
    param.shape.resize(next + permutation.size());
    for (size_t d = 0; d < pattern.shape.size(); ++d) {
      const unsigned s = sharding(endpoint, pattern.shape[d], someAxes(axes));
      part.dimensions.push_back({s, permutation[d]});
      param.shape[permutation[d]] = extent(s);
    }
    param.parts.push_back(part);
    return param;
  }

  std::mt19937_64 random_;
  bool files_, slow_; // the source is files; NICs are slow
};

/// Runs a pass. The module then has the schedules of its ranks, if there are any.
inline llvm::Error lower(const PassInfo &pass, Lowering &lowering) {
  llvm::Error error = pass.run(lowering);
  if (!error && lowering.ranks)
    lowering.module.schedule.ranks = allOf(*lowering.ranks);
  return error;
}

} // namespace reshard::ir
