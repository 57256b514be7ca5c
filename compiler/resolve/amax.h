// SPDX-License-Identifier: Apache-2.0
// The amax that tensor scales (nvfp4) are computed from: one number for each shard of a tensor that the source
// holds. These numbers are a tensor of their own, which is sharded and moved like others.
#pragma once

#include "compiler/resolve/interner.h"
#include "compiler/resolve/product_sets.h"
#include "ir/ir.h"

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace reshard {

/// A part of a source param that holds a tensor.
struct SourcePart {
  unsigned param, part;
};

/// The tensor of a tensor's amax over some of its dimensions. It has the other dimensions, then one that numbers
/// shards. The source may hold a shard for some positions of the other dimensions only.
struct AmaxTensor {
  struct Group {
    int64_t first, count;          // shards [first, first + count)
    std::vector<ProductSet> where; // along the other dimensions, disjoint: where the source holds each of these shards
  };
  int pattern = -1;
  std::vector<Group> groups;
};

/// The amax that a target param needs, which add() fills in part by part.
struct AmaxSlots {
  ir::Quantization format; // the param's format
  int leading;             // the dimensions from this one on are matrices
  int64_t count = 0;       // slots along dimension `leading`
  std::vector<ir::Part> parts{};
};

class AmaxShards {
public:
  /// `append` adds a source param with the location of param `like`.
  AmaxShards(ir::Layout &layout, std::function<void(unsigned like, ir::Param)> append)
      : layout_(layout), append_(std::move(append)) {}

  /// Appends to `slots` the amax that a part of a target param needs: each matrix needs the amax of every shard of
  /// every tensor in it, on any rank. Returns false if a source param has no such shards, because a dimension that
  /// numbers matrices is joined with others in one dimension of the param.
  bool add(unsigned endpoint, const ir::Part &part, const std::vector<SourcePart> &sourceParts, AmaxSlots &slots);

private:
  /// A tensor, and the dimensions that the amax is over (ir::QuantizedView::amaxDimensions).
  using Key = std::pair<int, unsigned>;
  /// The products of the positions along the other dimensions, by the coordinate of a shard.
  using Products = std::map<int64_t, std::set<std::vector<unsigned>>>;
  const AmaxTensor *of(const Key &key, const std::vector<SourcePart> &sourceParts, ir::Quantization format);
  std::optional<ir::Param> view(const SourcePart &sourcePart, unsigned over, AmaxTensor &amaxTensor, int64_t &count);
  bool dimensions(const SourcePart &sourcePart, unsigned over, ir::Param &amax, ir::Part &slot) const;
  Products products(const SourcePart &sourcePart, unsigned over, const std::vector<unsigned> &shardAxes,
                    Interner<ir::IndexMap> &positions) const;
  unsigned restricted(unsigned endpoint, unsigned sharding, const ir::IndexMap &positions, bool &any);

  ir::Layout &layout_;
  std::function<void(unsigned, ir::Param)> append_;
  std::map<Key, AmaxTensor> known_;
};

} // namespace reshard
