// The largest magnitudes that nvfp4's tensor scales follow from: of each shard of a tensor that the source holds one
// number, which stands in a tensor of its own and moves like others.
#pragma once

#include "compiler/resolve/product_sets.h"
#include "ir/ir.h"

#include <functional>
#include <map>
#include <vector>

namespace reshard {

/// A param of the source that holds a tensor.
struct SourcePart {
  unsigned param, part;
};

/// The tensor of a tensor's largest magnitudes over some of its dimensions. It has the others, and one behind them, of
/// shards: of these the source may hold some for some positions alone.
struct AmaxTensor {
  struct Group {
    int64_t first, count;          // numbers of shards
    std::vector<ProductSet> where; // disjoint: along the other dimensions, where the source holds each of them
  };
  int pattern = -1;
  std::vector<Group> groups;
};

class AmaxShards {
public:
  /// `append`: adds a source param like another one.
  AmaxShards(ir::Layout &layout, std::function<void(unsigned like, ir::Param)> append)
      : layout_(layout), append_(std::move(append)) {}

  /// Appends to `parts` what a part of a target param needs of them: for the matrices that the dimensions from
  /// `leading` on are, the largest magnitude of each shard of each tensor that is in them, on whatever ranks. The
  /// numbers stand along dimension `leading`, from `slots` on, which is raised. False where a source param holds the
  /// tensor in a way that has no such shards: where a dimension that numbers matrices shares the param's with others.
  bool add(unsigned endpoint, const ir::Part &part, const std::vector<SourcePart> &sourceParts, int leading,
           int64_t &slots, std::vector<ir::Part> &parts);

private:
  /// A tensor, and the dimensions that its numbers are over (ir::Face::over).
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
