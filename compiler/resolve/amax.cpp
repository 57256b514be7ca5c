// SPDX-License-Identifier: Apache-2.0
// Gives each shard of a tensor that the source holds a number, so that the amax values are a tensor with a dimension
// for that number. Shards with the same coordinates on the axes of the matrix have the same number.
#include "compiler/resolve/amax.h"

#include "compiler/resolve/mesh_ranks.h"

#include <algorithm>

namespace reshard {

using namespace ir;

namespace {

constexpr unsigned kMatrix = 3; // the last two dimensions

/// Whether `over` has dimension d of `count`: bit 0 is the last dimension.
bool isOver(unsigned over, size_t d, size_t count) { return count - 1 - d < 32 && (over >> (count - 1 - d) & 1) != 0; }

void use(const std::vector<unsigned> &more, std::vector<unsigned> &axes) {
  for (unsigned axis : more)
    if (std::find(axes.begin(), axes.end(), axis) == axes.end())
      axes.push_back(axis);
}

/// The axes of the shards of a part: the axes of the dimensions `over`.
std::vector<unsigned> shardAxes(const Endpoint &source, const Part &part, unsigned over) {
  std::vector<unsigned> axes;
  for (size_t d = 0; d < part.dimensions.size(); ++d)
    if (isOver(over, d, part.dimensions.size()))
      use(source.shardings[part.dimensions[d].sharding].axes, axes);
  return axes;
}

} // namespace

const AmaxTensor *AmaxShards::of(const Key &key, const std::vector<SourcePart> &sourceParts, Quantization format) {
  const auto [at, added] = known_.try_emplace(key);
  AmaxTensor &amaxTensor = at->second;
  if (!added)
    return amaxTensor.pattern < 0 ? nullptr : &amaxTensor;
  std::vector<std::pair<unsigned, Param>> views; // with the source param of each
  int64_t count = 0;
  for (const SourcePart &sourcePart : sourceParts) {
    std::optional<Param> amax = view(sourcePart, key.second, amaxTensor, count);
    if (!amax)
      return nullptr;
    amax->view->format = format;
    views.emplace_back(sourcePart.param, std::move(*amax));
  }
  const TensorPattern &tensor = layout_.tensorPatterns[static_cast<size_t>(key.first)];
  TensorPattern amax = tensor;
  amax.shape.clear();
  std::string along;
  for (size_t d = 0; d < tensor.shape.size(); ++d)
    if (isOver(key.second, d, tensor.shape.size()))
      along += (along.empty() ? "" : ", ") + std::to_string(d);
    else
      amax.shape.push_back(tensor.shape[d]);
  amax.name += key.second == kMatrix ? " (amax)" : " (amax over " + along + ")";
  amax.shape.push_back(count);
  amax.dtype = DType::fp32;
  amaxTensor.pattern = static_cast<int>(layout_.tensorPatterns.size());
  layout_.tensorPatterns.push_back(std::move(amax));
  for (auto &[like, param] : views) {
    param.parts[0].pattern = amaxTensor.pattern;
    append_(like, std::move(param));
  }
  return &amaxTensor;
}

/// Sets the shape of the amax of a part, without the dimension that numbers shards, and the same dimensions of its own
/// part. False if a dimension of the param joins dimensions that the amax is over with others.
bool AmaxShards::dimensions(const SourcePart &sourcePart, unsigned over, Param &amax, Part &slot) const {
  const Param &whole = layout_.endpoints[0].params[sourcePart.param];
  const Part &part = whole.parts[sourcePart.part];
  std::map<int, bool> used; // dimensions of the param -> whether another dimension may map to it
  for (size_t d = 0; d < part.dimensions.size(); ++d) {
    PartDimension dimension = part.dimensions[d];
    const bool inside = isOver(over, d, part.dimensions.size());
    if (dimension.param >= 0)
      if (const auto [at, added] = used.try_emplace(dimension.param, inside); !added && !(at->second && inside))
        return false;
    if (inside)
      continue;
    if (dimension.param >= 0) {
      amax.shape.push_back(whole.shape[static_cast<size_t>(dimension.param)]);
      dimension.param = static_cast<int>(amax.shape.size()) - 1;
    }
    slot.dimensions.push_back(dimension);
  }
  return true;
}

/// For each shard, the product sets of the other dimensions on the mesh ranks that hold it.
AmaxShards::Products AmaxShards::products(const SourcePart &sourcePart, unsigned over,
                                          const std::vector<unsigned> &shardAxes, Interner<IndexMap> &positions) const {
  const Endpoint &source = layout_.endpoints[0];
  const Param &whole = source.params[sourcePart.param];
  const Part &part = whole.parts[sourcePart.part];
  std::vector<unsigned> axes = shardAxes;
  for (const PartDimension &dimension : part.dimensions)
    use(source.shardings[dimension.sharding].axes, axes);
  for (unsigned instances : whole.instances)
    use(source.shardings[instances].axes, axes);
  for (const auto &rules : {whole.presence, source.authority})
    for (const Presence &rule : rules)
      use({rule.axis}, axes);
  Products result;
  for (int64_t meshRank : distinctMeshRanks(source, axes)) {
    if (instances(source, whole, meshRank) == 0 || !mayRead(source, meshRank))
      continue;
    std::vector<unsigned> product;
    bool any = true;
    for (size_t d = 0; d < part.dimensions.size() && any; ++d) {
      const Sharding &along = source.shardings[part.dimensions[d].sharding];
      const IndexMap &here = along.at[static_cast<size_t>(coordinate(source, along.axes, meshRank))];
      any = !here.empty();
      if (!isOver(over, d, part.dimensions.size()))
        product.push_back(positions.intern(identityOn(here)));
    }
    if (any)
      result[coordinate(source, shardAxes, meshRank)].insert(std::move(product));
  }
  return result;
}

/// The view of a part's amax, whose shards get numbers from `count` on. Mesh ranks with the same coordinates on the
/// axes of the dimensions `over` hold the same shard. nullopt if a dimension of the param joins these dimensions with
/// others.
std::optional<Param> AmaxShards::view(const SourcePart &sourcePart, unsigned over, AmaxTensor &amaxTensor,
                                      int64_t &count) {
  Endpoint &source = layout_.endpoints[0];
  const Part &part = source.params[sourcePart.param].parts[sourcePart.part];
  Param amax = source.params[sourcePart.param];
  amax.shape.clear();
  Part slot;
  if (!dimensions(sourcePart, over, amax, slot))
    return std::nullopt;
  Sharding sharding;
  sharding.axes = shardAxes(source, part, over);
  Interner<IndexMap> positions;
  std::map<std::set<std::vector<unsigned>>, std::vector<int64_t>> bySets; // coordinates
  for (auto &[at, set] : products(sourcePart, over, sharding.axes, positions))
    bySets[set].push_back(at);
  int64_t coordinates = 1;
  for (unsigned axis : sharding.axes)
    coordinates *= source.axes[axis].size;
  sharding.at.resize(static_cast<size_t>(coordinates)); // empty for shards that no readable mesh rank has
  for (const auto &[set, members] : bySets) {
    std::vector<ProductSet> where;
    for (const std::vector<unsigned> &numbers : set) {
      ProductSet &product = where.emplace_back();
      for (unsigned each : numbers)
        product.push_back(positions[each]);
    }
    amaxTensor.groups.push_back({count, std::ssize(members), makeDisjoint(where)});
    for (int64_t at : members)
      sharding.at[static_cast<size_t>(at)] = {{count++, 0, 1, 1, 0, 0}};
  }
  slot.dimensions.push_back({static_cast<unsigned>(source.shardings.size()), static_cast<int>(amax.shape.size())});
  source.shardings.push_back(std::move(sharding));
  amax.shape.push_back({{}, {1}});
  amax.dtype = DType::fp32;
  amax.name += " (amax of '" + layout_.tensorPatterns[static_cast<size_t>(part.pattern)].name + "'" +
               (over != kMatrix ? " over " + std::to_string(over) : "") +
               (sourcePart.part > 0 ? ", part " + std::to_string(sourcePart.part) : "") + ")";
  amax.parts = {slot};
  amax.view = QuantizedView{.kind = ViewKind::amax,
                            .staged = true,
                            .codes = sourcePart.param,
                            .scales = sourcePart.param,
                            .tensorScale = sourcePart.param,
                            .part = sourcePart.part,
                            .amaxDimensions = over == kMatrix ? 0 : over};
  return amax;
}

bool AmaxShards::add(unsigned e, const Part &part, const std::vector<SourcePart> &sourceParts, AmaxSlots &slots) {
  const int leading = slots.leading;
  Endpoint &target = layout_.endpoints[e];
  const size_t dimensions = part.dimensions.size();
  const size_t variables = layout_.tensorPatterns[static_cast<size_t>(part.pattern)].variables.size();
  unsigned over = 0;
  for (size_t d = variables; d < dimensions; ++d)
    over |= part.dimensions[d].param >= leading ? 1u << (dimensions - 1 - d) : 0;
  const AmaxTensor *amaxTensor = over == 0 ? nullptr : of({part.pattern, over}, sourceParts, slots.format);
  if (!amaxTensor)
    return false;
  for (const AmaxTensor::Group &group : amaxTensor->groups) {
    // For index variables inside the matrix, the numbers of all values that any rank has, one group after the other.
    const size_t before = slots.parts.size();
    std::vector<unsigned> sharding(dimensions);
    int64_t numbers = group.count;
    for (size_t d = 0; d < dimensions; ++d) {
      sharding[d] = part.dimensions[d].sharding;
      if (d >= variables || part.dimensions[d].param < leading)
        continue;
      IndexMap all;
      for (const IndexMap &each : target.shardings[sharding[d]].at)
        if (const IndexMap more = difference(each, all); !more.empty()) {
          all.insert(all.end(), more.begin(), more.end());
          all = normalize(std::move(all));
        }
      IndexMap spread;
      int64_t next = 0;
      for (const auto &[value, same] : expand(all))
        spread.push_back({value, numbers * next++, 1, 1, 0, 0});
      numbers *= next;
      sharding[d] = static_cast<unsigned>(target.shardings.size());
      target.shardings.push_back({{}, {normalize(std::move(spread))}, 1});
    }
    for (const ProductSet &product : group.where) {
      Part needed;
      needed.pattern = amaxTensor->pattern;
      bool any = true;
      for (size_t d = 0, outer = 0; d < dimensions && any; ++d)
        if (d < variables || part.dimensions[d].param < leading)
          needed.dimensions.push_back(
              {restricted(e, sharding[d], product[outer++], any), std::min(part.dimensions[d].param, leading)});
      if (!any)
        continue;
      needed.dimensions.push_back({static_cast<unsigned>(target.shardings.size()), leading});
      target.shardings.push_back({{}, {{{group.first, slots.count, group.count, 1, 0, 0}}}, 1});
      slots.parts.push_back(std::move(needed));
    }
    slots.count += slots.parts.size() > before ? numbers : 0;
  }
  return true;
}

/// A sharding restricted to `positions`. `any`: whether positions remain.
unsigned AmaxShards::restricted(unsigned e, unsigned number, const IndexMap &positions, bool &any) {
  Endpoint &target = layout_.endpoints[e];
  const Sharding &sharding = target.shardings[number];
  Sharding less{sharding.axes, {}, sharding.unit};
  any = false;
  bool same = true;
  for (const IndexMap &all : sharding.at) {
    less.at.push_back(restrict(all, positions));
    any = any || !less.at.back().empty();
    same = same && positionCount(less.at.back()) == positionCount(all);
  }
  if (same)
    return number;
  target.shardings.push_back(std::move(less));
  return static_cast<unsigned>(target.shardings.size() - 1);
}

} // namespace reshard
