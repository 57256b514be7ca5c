// The largest magnitudes that nvfp4's tensor scales follow from: of each shard of a tensor that the source holds one
// number, which stands in a tensor of its own and moves like others.
#pragma once

#include "compiler/boxes.h"
#include "ir/ir.h"

#include <functional>
#include <map>
#include <vector>

namespace reshard {

/// A param of the source that holds a tensor.
struct Holding {
  unsigned param, part;
};

/// The tensor of a tensor's largest magnitudes over some of its dimensions. It has the others, and one behind them, of
/// shards: of these the source may hold some for some positions alone.
struct Shards {
  struct Group {
    int64_t first, count;   // numbers of shards
    std::vector<Box> where; // disjoint: along the other dimensions, where the source holds each of them
  };
  int family = -1;
  std::vector<Group> groups;
};

class LargestShards {
public:
  /// `append`: adds a source param like another one.
  LargestShards(ir::Layout &layout, std::function<void(unsigned like, ir::Param)> append)
      : layout_(layout), append_(std::move(append)) {}

  /// Appends to `parts` what a part of a target param needs of them: for the matrices that the dimensions from
  /// `leading` on are, the largest magnitude of each shard of each tensor that is in them, on whatever ranks. The
  /// numbers stand along dimension `leading`, from `slots` on, which is raised. False where a source param holds the
  /// tensor in a way that has no such shards: where a dimension that numbers matrices shares the param's with others.
  bool add(unsigned endpoint, const ir::Part &part, const std::vector<Holding> &holdings, int leading, int64_t &slots,
           std::vector<ir::Part> &parts);

private:
  /// A tensor, and the dimensions that its numbers are over (ir::Face::over).
  using Key = std::pair<int, unsigned>;
  const Shards *of(const Key &key, const std::vector<Holding> &holdings);
  bool show(const Holding &holding, unsigned over, Shards &shards, int64_t &count,
            std::vector<std::pair<unsigned, ir::Param>> &faces);
  unsigned restricted(unsigned endpoint, unsigned share, const ir::Segments &positions, bool &any);

  ir::Layout &layout_;
  std::function<void(unsigned, ir::Param)> append_;
  std::map<Key, Shards> known_;
};

} // namespace reshard
