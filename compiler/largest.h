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

/// The tensor of a tensor's largest magnitudes. It has the tensor's dimensions but for the last two, in place of which
/// there is one, of shards: of these the source may hold some for some positions alone.
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

  /// The shards of all holders of a tensor that may be read. Null where a source param holds it in a way that has no
  /// matrices: where the last two dimensions share theirs with others.
  const Shards *of(int family, const std::vector<Holding> &holdings);

  /// Appends to `parts` what a target needs of them for a part of the tensor. The numbers stand along `dimension`, from
  /// `slots` on, which is raised.
  void add(unsigned endpoint, const ir::Part &part, const Shards &shards, int dimension, int64_t &slots,
           std::vector<ir::Part> &parts);

private:
  bool show(const Holding &holding, Shards &shards, int64_t &count, std::vector<std::pair<unsigned, ir::Param>> &faces);
  unsigned restricted(unsigned endpoint, unsigned share, const ir::Segments &positions, bool &any);

  ir::Layout &layout_;
  std::function<void(unsigned, ir::Param)> append_;
  std::map<int, Shards> known_; // by tensor
};

} // namespace reshard
