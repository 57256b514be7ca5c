#include "compiler/largest.h"

#include "compiler/interner.h"
#include "compiler/places.h"

#include <algorithm>
#include <set>

namespace reshard {

using namespace ir;

namespace {

constexpr unsigned kMatrix = 3; // the last two dimensions

/// Whether bit i of `over` stands for dimension d of `count`.
bool isOver(unsigned over, size_t d, size_t count) { return count - 1 - d < 32 && (over >> (count - 1 - d) & 1) != 0; }

} // namespace

const Shards *LargestShards::of(const Key &key, const std::vector<Holding> &holdings) {
  const auto [at, added] = known_.try_emplace(key);
  Shards &shards = at->second;
  if (!added)
    return shards.family < 0 ? nullptr : &shards;
  std::vector<std::pair<unsigned, Param>> faces; // and what they are like
  int64_t count = 0;
  for (const Holding &holding : holdings)
    if (!show(holding, key.second, shards, count, faces))
      return nullptr;
  const Family &tensor = layout_.families[static_cast<size_t>(key.first)];
  Family largest = tensor;
  largest.shape.clear();
  std::string along;
  for (size_t d = 0; d < tensor.shape.size(); ++d)
    if (isOver(key.second, d, tensor.shape.size()))
      along += (along.empty() ? "" : ", ") + std::to_string(d);
    else
      largest.shape.push_back(tensor.shape[d]);
  largest.name += key.second == kMatrix ? " (largest)" : " (largest over " + along + ")";
  largest.shape.push_back(count);
  largest.dtype = DType::fp32;
  shards.family = static_cast<int>(layout_.families.size());
  layout_.families.push_back(std::move(largest));
  for (auto &[like, face] : faces) {
    face.parts[0].family = shards.family;
    append_(like, std::move(face));
  }
  return &shards;
}

/// The face of the largest magnitudes of a part. A shard is what the places with the same coordinates along the
/// dimensions that they are over hold of these.
bool LargestShards::show(const Holding &holding, unsigned over, Shards &shards, int64_t &count,
                         std::vector<std::pair<unsigned, Param>> &faces) {
  Endpoint &source = layout_.endpoints[0];
  const Param &whole = source.params[holding.param];
  const Part &part = whole.parts[holding.part];
  const size_t dimensions = part.dimensions.size();
  Param largest = whole;
  largest.shape.clear();
  Part slot;
  std::map<int, bool> used; // of the param; whether they may be used again
  for (size_t d = 0; d < dimensions; ++d) {
    PartDimension dimension = part.dimensions[d];
    const bool inside = isOver(over, d, dimensions);
    if (dimension.param >= 0)
      if (const auto [at, added] = used.try_emplace(dimension.param, inside); !added && !(at->second && inside))
        return false;
    if (inside)
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
  for (size_t d = 0; d < dimensions; ++d)
    if (isOver(over, d, dimensions))
      use(source.shares[part.dimensions[d].share].axes, share.axes);
  std::vector<unsigned> axes = share.axes;
  for (const PartDimension &dimension : part.dimensions)
    use(source.shares[dimension.share].axes, axes);
  for (unsigned instances : whole.instances)
    use(source.shares[instances].axes, axes);
  for (const auto &rules : {whole.presence, source.authority})
    for (const Presence &rule : rules)
      use({rule.axis}, axes);

  // Of each coordinate of a shard, the boxes along the other dimensions that places have.
  Interner<Segments> positions;
  std::map<int64_t, std::set<std::vector<unsigned>>> boxes;
  for (int64_t place : distinctPlaces(source, axes)) {
    if (instances(source, whole, place) == 0 || !authorised(source, place))
      continue;
    std::vector<unsigned> box;
    bool any = true;
    for (size_t d = 0; d < dimensions && any; ++d) {
      const Share &along = source.shares[part.dimensions[d].share];
      const Segments &here = along.at[static_cast<size_t>(coordinate(source, along.axes, place))];
      any = !here.empty();
      if (!isOver(over, d, dimensions))
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
                  (over != kMatrix ? " over " + std::to_string(over) : "") +
                  (holding.part > 0 ? ", part " + std::to_string(holding.part) : "") + ")";
  largest.parts = {slot};
  largest.face =
      Face{FaceKind::amax, Quantization::nvfp4,       true, false, holding.param, holding.param, holding.param,
           holding.part,   over == kMatrix ? 0 : over};
  faces.emplace_back(holding.param, std::move(largest));
  return true;
}

bool LargestShards::add(unsigned e, const Part &part, const std::vector<Holding> &holdings, int leading, int64_t &slots,
                        std::vector<Part> &parts) {
  Endpoint &target = layout_.endpoints[e];
  const size_t dimensions = part.dimensions.size();
  const size_t variables = layout_.families[static_cast<size_t>(part.family)].variables.size();
  unsigned over = 0;
  for (size_t d = variables; d < dimensions; ++d)
    over |= part.dimensions[d].param >= leading ? 1u << (dimensions - 1 - d) : 0;
  const Shards *shards = over == 0 ? nullptr : of({part.family, over}, holdings);
  if (!shards)
    return false;
  for (const Shards::Group &group : shards->groups) {
    // Of index variables that lie in the matrix, all values that any rank has: one set of numbers behind the other.
    const size_t before = parts.size();
    std::vector<unsigned> share(dimensions);
    int64_t numbers = group.count;
    for (size_t d = 0; d < dimensions; ++d) {
      share[d] = part.dimensions[d].share;
      if (d >= variables || part.dimensions[d].param < leading)
        continue;
      Segments all;
      for (const Segments &each : target.shares[share[d]].at)
        if (const Segments more = difference(each, all); !more.empty()) {
          all.insert(all.end(), more.begin(), more.end());
          all = normalize(std::move(all));
        }
      Segments spread;
      int64_t next = 0;
      for (const auto &[value, same] : expand(all))
        spread.push_back({value, numbers * next++, 1, 1, 0, 0});
      numbers *= next;
      share[d] = static_cast<unsigned>(target.shares.size());
      target.shares.push_back({{}, {normalize(std::move(spread))}, 1});
    }
    for (const Box &box : group.where) {
      Part needed;
      needed.family = shards->family;
      bool any = true;
      for (size_t d = 0, kept = 0; d < dimensions && any; ++d)
        if (d < variables || part.dimensions[d].param < leading)
          needed.dimensions.push_back(
              {restricted(e, share[d], box[kept++], any), std::min(part.dimensions[d].param, leading)});
      if (!any)
        continue;
      needed.dimensions.push_back({static_cast<unsigned>(target.shares.size()), leading});
      target.shares.push_back({{}, {{{group.first, slots, group.count, 1, 0, 0}}}, 1});
      parts.push_back(std::move(needed));
    }
    slots += parts.size() > before ? numbers : 0;
  }
  return true;
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
