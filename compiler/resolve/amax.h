// The amax that the tensor scales of nvfp4 are computed from: one number for each shard of a tensor that the source
// holds. These numbers are a tensor of their own, which is sharded and moved like others.
#pragma once

#include "compiler/resolve/product_sets.h"
#include "ir/ir.h"

#include <functional>
#include <map>
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

class AmaxShards {
public:
  /// `append` adds a source param with the location of param `like`.
  AmaxShards(ir::Layout &layout, std::function<void(unsigned like, ir::Param)> append)
      : layout_(layout), append_(std::move(append)) {}

  /// Appends to `parts` the amax that a part of a target param needs. The dimensions from `leading` on are matrices;
  /// each needs the amax of every shard of every tensor in it, on any rank. The numbers are stored along dimension
  /// `leading` from slot `slots` on, which is advanced. Returns false if a source param has no such shards, because a
  /// dimension that numbers matrices is joined with others in one dimension of the param.
  bool add(unsigned endpoint, const ir::Part &part, const std::vector<SourcePart> &sourceParts, int leading,
           int64_t &slots, std::vector<ir::Part> &parts);

private:
  /// A tensor, and the dimensions that the amax is over (ir::QuantizedView::amaxDimensions).
  using Key = std::pair<int, unsigned>;
  const AmaxTensor *of(const Key &key, const std::vector<SourcePart> &sourceParts);
  bool addView(const SourcePart &sourcePart, unsigned over, AmaxTensor &amaxTensor, int64_t &count,
               std::vector<std::pair<unsigned, ir::Param>> &views);
  unsigned restricted(unsigned endpoint, unsigned sharding, const ir::IndexMap &positions, bool &any);

  ir::Layout &layout_;
  std::function<void(unsigned, ir::Param)> append_;
  std::map<Key, AmaxTensor> known_;
};

} // namespace reshard
