#include "compiler/largest.h"

#include "compiler/interner.h"
#include "compiler/places.h"

#include <algorithm>
#include <set>

namespace reshard {

using namespace ir;

const Shards *LargestShards::of(int number, const std::vector<Holding> &holdings) {
  const auto [at, added] = known_.try_emplace(number);
  Shards &shards = at->second;
  if (!added)
    return shards.family < 0 ? nullptr : &shards;
  std::vector<std::pair<unsigned, Param>> faces; // and what they are like
  int64_t count = 0;
  for (const Holding &holding : holdings)
    if (!show(holding, shards, count, faces))
      return nullptr;
  Family largest = layout_.families[static_cast<size_t>(number)];
  largest.name += " (largest)";
  largest.shape.pop_back();
  largest.shape.back() = count;
  largest.dtype = DType::fp32;
  shards.family = static_cast<int>(layout_.families.size());
  layout_.families.push_back(std::move(largest));
  for (auto &[like, face] : faces) {
    face.parts[0].family = shards.family;
    append_(like, std::move(face));
  }
  return &shards;
}

/// The face of the largest magnitudes of a part. A shard is what the places with the same coordinates along the last two
/// dimensions hold of them.
bool LargestShards::show(const Holding &holding, Shards &shards, int64_t &count, std::vector<std::pair<unsigned, Param>> &faces) {
  Endpoint &source = layout_.endpoints[0];
  const Param &whole = source.params[holding.param];
  const Part &part = whole.parts[holding.part];
  const size_t outer = part.dimensions.size() - 2;
  Param largest = whole;
  largest.shape.clear();
  Part slot;
  std::set<int> used;
  for (size_t d = 0; d < part.dimensions.size(); ++d) {
    PartDimension dimension = part.dimensions[d];
    const bool flat = d > outer && dimension.param == part.dimensions[outer].param; // both of the matrix in one dimension
    if (dimension.param >= 0 && !used.insert(dimension.param).second && !flat)
      return false;
    if (d >= outer)
      continue;
    if (dimension.param >= 0) {
      largest.shape.push_back(whole.shape[static_cast<size_t>(dimension.param)]);
      dimension.param = static_cast<int>(largest.shape.size()) - 1;
    }
    slot.dimensions.push_back(dimension);
  }
  auto use = [&](const std::vector<unsigned> &more, std::vector<unsigned> &axes) {
    for (unsigned axis : more)
      if (std::find(axes.begin(), axes.end(), axis) == axes.end())
        axes.push_back(axis);
  };
  Share share;
  for (size_t d = outer; d < part.dimensions.size(); ++d)
    use(source.shares[part.dimensions[d].share].axes, share.axes);
  std::vector<unsigned> axes = share.axes;
  for (size_t d = 0; d < outer; ++d)
    use(source.shares[part.dimensions[d].share].axes, axes);
  for (unsigned instances : whole.instances)
    use(source.shares[instances].axes, axes);
  for (const auto &rules : {whole.presence, source.authority})
    for (const Presence &rule : rules)
      use({rule.axis}, axes);

  // Of each coordinate along the matrix, the boxes along the other dimensions that places have.
  Interner<Segments> positions;
  std::map<int64_t, std::set<std::vector<unsigned>>> boxes;
  for (int64_t place : distinctPlaces(source, axes)) {
    if (instances(source, whole, place) == 0 || !authorised(source, place))
      continue;
    std::vector<unsigned> box;
    bool any = true;
    for (size_t d = 0; d < part.dimensions.size() && any; ++d) {
      const Share &along = source.shares[part.dimensions[d].share];
      const Segments &here = along.at[static_cast<size_t>(coordinate(source, along.axes, place))];
      any = !here.empty();
      if (d < outer)
        box.push_back(positions.intern(itself(here)));
    }
    if (any)
      boxes[coordinate(source, share.axes, place)].insert(std::move(box));
  }
  std::map<std::set<std::vector<unsigned>>, std::vector<int64_t>> alike; // coordinates
  for (auto &[at, set] : boxes)
    alike[set].push_back(at);
  int64_t coordinates = 1;
  for (unsigned axis : share.axes)
    coordinates *= source.axes[axis].size;
  share.at.resize(static_cast<size_t>(coordinates)); // of what no place that may be read has, nothing
  for (const auto &[set, members] : alike) {
    std::vector<Box> where;
    for (const std::vector<unsigned> &numbers : set) {
      Box &box = where.emplace_back();
      for (unsigned each : numbers)
        box.push_back(positions[each]);
    }
    shards.groups.push_back({count, std::ssize(members), disjoint(where)});
    for (int64_t at : members)
      share.at[static_cast<size_t>(at)] = {{count++, 0, 1, 1, 0, 0}};
  }
  slot.dimensions.push_back({static_cast<unsigned>(source.shares.size()), static_cast<int>(largest.shape.size())});
  source.shares.push_back(std::move(share));
  largest.shape.push_back({{}, {1}});
  largest.dtype = DType::fp32;
  largest.name += " (largest of '" + layout_.families[static_cast<size_t>(part.family)].name + "'" +
                  (holding.part > 0 ? ", part " + std::to_string(holding.part) : "") + ")";
  largest.parts = {slot};
  largest.face = Face{FaceKind::amax, Quantization::nvfp4, true, false, holding.param, holding.param, holding.param, holding.part};
  faces.emplace_back(holding.param, std::move(largest));
  return true;
}

void LargestShards::add(unsigned e, const Part &part, const Shards &shards, int dimension, int64_t &slots,
                        std::vector<Part> &parts) {
  Endpoint &target = layout_.endpoints[e];
  const size_t outer = part.dimensions.size() - 2;
  for (const Shards::Group &group : shards.groups) {
    const size_t before = parts.size();
    for (const Box &box : group.where) {
      Part needed;
      needed.family = shards.family;
      bool any = true;
      for (size_t d = 0; d < outer && any; ++d)
        needed.dimensions.push_back({restricted(e, part.dimensions[d].share, box[d], any), part.dimensions[d].param});
      if (!any)
        continue;
      needed.dimensions.push_back({static_cast<unsigned>(target.shares.size()), dimension});
      target.shares.push_back({{}, {{{group.first, slots, group.count, 1, 0, 0}}}, 1});
      parts.push_back(std::move(needed));
    }
    slots += parts.size() > before ? group.count : 0;
  }
}

/// A share without positions that are not among these. `any`: whether it has any.
unsigned LargestShards::restricted(unsigned e, unsigned number, const Segments &positions, bool &any) {
  Endpoint &target = layout_.endpoints[e];
  const Share &share = target.shares[number];
  Share less{share.axes, {}, share.unit};
  any = false;
  bool same = true;
  for (const Segments &all : share.at) {
    less.at.push_back(restrict(all, positions));
    any = any || !less.at.back().empty();
    same = same && size(less.at.back()) == size(all);
  }
  if (same)
    return number;
  target.shares.push_back(std::move(less));
  return static_cast<unsigned>(target.shares.size() - 1);
}

} // namespace reshard
