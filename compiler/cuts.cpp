// The dimensions of a finished param: padded and cut, each on its own (docs/yaml.md, section 6, "Cut"), then the parts
// that their products are: one for each tensor, zeros for the padding.

#include "compiler/params.h"

#include <algorithm>

namespace reshard {

using ir::Segment;
using ir::Segments;

namespace {

std::string text(int64_t number) { return std::to_string(number); }

/// Calls visit(choice) for each combination of 0 <= choice[i] < sizes[i].
template <class Visit> void forEachChoice(const std::vector<size_t> &sizes, Visit visit) {
  std::vector<size_t> choice(sizes.size());
  while (true) {
    visit(choice);
    size_t i = sizes.size();
    while (i > 0 && ++choice[i - 1] == sizes[i - 1])
      choice[--i] = 0;
    if (i == 0)
      return;
  }
}

/// `unit` rows of the whole array, in rows of a tensor that stands there by `relation`: its runs begin with a unit and
/// hold whole units, or stand within one; `all` where neither is so, which keeps the tensor in one.
int64_t unitOf(const Segments &relation, int64_t unit, int64_t all) {
  if (unit <= 1 || relation.empty())
    return 1;
  const Segment &run = relation.front();
  const bool regular = relation.size() == 1 && run.from == 0;
  if (regular && run.to % unit == 0 && run.toStep % unit == 0 && (run.count == 1 || run.length % unit == 0))
    return unit;
  if (regular && run.count > 1 && unit % run.toStep == 0 && run.fromStep == run.length)
    return unit / run.toStep * run.length;
  return all;
}

} // namespace

/// Whether the dimensions that `stack`, `shard` and `pad` name are there.
bool Params::checkDimensions(const Building &building) const {
  const ParamDeclaration &declaration = building.declaration;
  const int64_t rank = static_cast<int64_t>(building.pack.shape.size()) + (building.stack >= 0);
  bool ok = true;
  auto check = [&](bool holds, Location at, const std::string &message) {
    if (!holds)
      diagnostics_.error(at, message);
    ok = ok && holds;
  };
  if (building.pack.kind == Pack::Kind::flat && declaration.stack)
    check(false, declaration.stack->second,
          "'stack' of " + building.title() + ", which is flat, expected one or the other");
  const std::string has = building.title() + " has " + text(rank) + (rank == 1 ? " dimension" : " dimensions");
  check(rank <= kMaxDimensions, declaration.at, has + ", expected at most " + text(kMaxDimensions));
  if (building.stack >= 0)
    check(declaration.stackDimension >= 0 && declaration.stackDimension < rank, declaration.stack->second,
          "'stack' makes dimension " + text(declaration.stackDimension) + ", but " + has + " with it");
  for (const auto &[d, rule] : declaration.shard)
    check(d >= 0 && d < rank, rule.at, "'shard' of dimension " + text(d) + ", but " + has);
  for (const auto &[d, multiple] : declaration.pad)
    check(d >= 0 && d < rank, multiple.at, "'pad' of dimension " + text(d) + ", but " + has);
  return ok;
}

/// Pads and cuts the next dimension.
bool Params::cutDimension(Building &building, int64_t d) const {
  const ParamDeclaration &declaration = building.declaration;
  const auto shard = declaration.shard.find(d);
  const auto pad = declaration.pad.find(d);
  const bool ruled = shard != declaration.shard.end(), padded = pad != declaration.pad.end();
  Dimension &dimension = building.dimensions.emplace_back();
  dimension.stack = building.stack >= 0 && d == declaration.stackDimension;
  const bool placed = dimension.stack && placing_.placed(static_cast<unsigned>(building.stack)).ruled;
  const std::string title = "dimension " + text(d) + " of " + building.title();
  auto refuse = [&](Location at, const std::string &message) {
    diagnostics_.error(at, message);
    return false;
  };
  if (placed) {
    if (ruled || padded)
      return refuse(ruled ? shard->second.at : pad->second.at,
                    std::string(ruled ? "'shard'" : "'pad'") + " of " + title + ", which stacks '" +
                        declaration.stack->first + "', but '" + declaration.stack->first + "' is placed over " +
                        placing_.placed(static_cast<unsigned>(building.stack)).rule.over);
    return cutPlacedStack(building, dimension);
  }

  PackTree slots; // of a stack whose variable is not placed: a dimension like others
  const PackTree &pack = dimension.stack ? slots : building.pack;
  const int64_t inPack = dimension.stack ? 0 : d - (building.stack >= 0 && d > declaration.stackDimension);
  if (dimension.stack) {
    slots.shape = {size(building.exists[building.stack])};
    dimension.relations = {dense(building.exists[building.stack])};
  } else if (pack.kind != Pack::Kind::flat) { // whose entries are placed by flat.cpp
    dimension.relations = joinedRelations(pack, inPack);
  }
  dimension.rows = dimension.padded = pack.shape[inPack];
  if (padded) {
    const auto multiple = evaluate(pad->second, placing_.names(), diagnostics_);
    if (!multiple)
      return false;
    if (*multiple < 1)
      return refuse(pad->second.at, "'pad' to a multiple of " + text(*multiple) + ", expected at least 1");
    const int64_t rest = dimension.rows % *multiple;
    if (rest != 0 && *multiple - rest > kMaxRows - dimension.rows)
      return refuse(pad->second.at, "'pad' to a multiple of " + text(*multiple) + " makes more than 2^60 rows");
    if (rest != 0)
      dimension.padded += *multiple - rest;
  }
  if (!dimension.stack && tensors_.opaque(building.leaves[0]->tensor)) {
    dimension.unit = dimension.padded;
    if (ruled || padded)
      return refuse(ruled ? shard->second.at : pad->second.at,
                    std::string(ruled ? "'shard'" : "'pad'") + " of " + title + ", which holds opaque tensor '" +
                        tensors_.name(building.leaves[0]->tensor) + "', expected it whole");
  }
  const bool joined = declaration.joined || dimension.stack;
  if (!ruled) {
    dimension.shares.at = {ir::identity(dimension.padded)};
    dimension.shares.lengths = {dimension.padded};
    return true;
  }
  const auto rule = placing_.rule(shard->second, "row");
  if (!rule)
    return false;
  dimension.axes = rule->axes;
  if (!joined && cutsComponents(pack, inPack)) {
    const std::string why = ", whose components are cut one by one, expected 'cut: joined'";
    if (padded)
      return refuse(pad->second.at, "'pad' of " + title + why);
    if (hasLists(rule->scheme))
      return refuse(rule->at, "'" + rule->scheme.name + "' on " + title + why);
  }
  std::string error;
  auto shares = reshard::cutDimension(pack, inPack, dimension.padded, rule->scheme, rule->ranks, joined, error);
  if (!shares)
    return refuse(rule->at, title + " over " + rule->over + ": " + error);
  if (!shares->repeats.empty() && placing_.source())
    return refuse(rule->at, title + ": 'map' gives a rank a row twice, which only a target may have");
  dimension.shares = std::move(*shares);
  const bool grouped = pack.kind == Pack::Kind::interleave && pack.dimension == inPack;
  dimension.unit = rule->scheme.unit > 0 ? rule->scheme.unit : grouped ? std::max<int64_t>(pack.groupRows(), 1) : 1;
  return true;
}

/// The dimension of a stack whose variable is placed: slots in the rule's order, without gaps where values have no
/// tensor.
bool Params::cutPlacedStack(Building &building, Dimension &dimension) const {
  const Placing::Placed &placed = placing_.placed(static_cast<unsigned>(building.stack));
  const Segments &exists = building.exists[building.stack];
  dimension.relations = {ir::identity(model_.variables[building.stack].size)};
  dimension.rows = dimension.padded = model_.variables[building.stack].size;
  dimension.axes = placed.rule.axes;
  Shares &shares = dimension.shares = placed.shares;
  for (size_t r = 0; r < shares.at.size(); ++r) {
    std::vector<Segments *> layers = {&shares.at[r]};
    for (auto &repeats : shares.repeats)
      layers.push_back(&repeats[r]);
    Segments slots;
    for (Segments *layer : layers) {
      *layer = restrict(*layer, exists);
      const Segments taken = inverse(*layer);
      slots.insert(slots.end(), taken.begin(), taken.end());
    }
    slots = dense(ir::normalize(std::move(slots)));
    for (Segments *layer : layers)
      *layer = compose(*layer, slots);
    shares.lengths[r] = size(slots);
  }
  return true;
}

/// An axis serves one dimension, or places index variables of the param, but not both.
bool Params::checkAxes(const Building &building) const {
  const ParamDeclaration &declaration = building.declaration;
  std::vector<std::pair<std::string, std::string>> used; // axis, what it does
  std::vector<unsigned> variables = building.param.variables;
  if (building.stack >= 0)
    variables.push_back(static_cast<unsigned>(building.stack));
  for (unsigned v : variables)
    for (const std::string &axis : placing_.placed(v).rule.names)
      used.emplace_back(axis, "places '" + model_.variables[v].name + "'");
  bool ok = true;
  for (const auto &[d, rule] : declaration.shard) {
    const size_t before = used.size();
    for (const auto &[axis, at] : rule.axes) {
      for (size_t i = 0; i < before; ++i)
        if (used[i].first == axis) {
          diagnostics_.error(at, "axis '" + axis + "' cannot share dimension " + text(d) + " of " + building.title() +
                                     ": it " + used[i].second);
          ok = false;
          break;
        }
      used.emplace_back(axis, "shares dimension " + text(d) + " already");
    }
  }
  return ok;
}

ir::Extent Params::extentOf(const Dimension &dimension) {
  const std::vector<int64_t> &lengths = dimension.shares.lengths;
  if (std::all_of(lengths.begin(), lengths.end(), [&](int64_t length) { return length == lengths[0]; }))
    return {{}, {lengths[0]}};
  return {dimension.axes, lengths};
}

/// A part for each tensor and each combination of repeats (almost always one).
bool Params::addParts(Building &building) const {
  for (const Dimension &dimension : building.dimensions)
    building.param.shape.push_back(extentOf(dimension));
  for (size_t leaf = 0; leaf < building.leaves.size(); ++leaf) {
    const unsigned familyNumber = tensors_.all()[building.leaves[leaf]->tensor].family;
    const ir::Family &family = tensors_.families()[familyNumber];
    std::vector<std::vector<ir::PartDimension>> choices;
    auto choose = [&](size_t d) { // the layers of a dimension, seen from the tensor
      const Dimension &dimension = building.dimensions[d];
      const Segments &relation = dimension.relations[dimension.stack ? 0 : leaf];
      for (size_t i = 0; i < dimension.shares.layers(); ++i) {
        ir::Share share{dimension.axes, dimension.shares.layer(i), unitOf(relation, dimension.unit, dimension.padded)};
        if (relation != ir::identity(dimension.padded))
          for (Segments &segments : share.at)
            segments = compose(relation, segments);
        choices.back().push_back({placing_.intern(std::move(share)), static_cast<int>(d)});
      }
    };
    for (size_t i = 0; i < family.variables.size(); ++i) {
      choices.emplace_back();
      if (static_cast<int>(family.variables[i]) == building.stack)
        choose(building.declaration.stackDimension);
      else
        choices.back().push_back({placing_.instances(family.variables[i], building.exists[family.variables[i]]), -1});
    }
    const std::vector<int64_t> &permute = building.leaves[leaf]->permute;
    for (size_t t = 0; t < family.shape.size(); ++t) {
      choices.emplace_back();
      const size_t finished = std::find(permute.begin(), permute.end(), static_cast<int64_t>(t)) - permute.begin();
      choose(finished + (building.stack >= 0 && static_cast<int64_t>(finished) >= building.declaration.stackDimension));
    }
    std::vector<size_t> sizes;
    size_t combinations = 1;
    constexpr size_t kMostParts = 1 << 12;
    for (const auto &list : choices) {
      sizes.push_back(list.size());
      combinations = std::min(combinations * list.size(), kMostParts + 1);
    }
    if (combinations > kMostParts) {
      diagnostics_.error(building.declaration.at, building.title() + " holds a row more than " + text(kMostParts) +
                                                      " times, expected fewer repeats in 'map'");
      return false;
    }
    forEachChoice(sizes, [&](const std::vector<size_t> &choice) {
      ir::Part &part = building.param.parts.emplace_back();
      part.family = static_cast<int>(familyNumber);
      for (size_t d = 0; d < choice.size(); ++d)
        part.dimensions.push_back(choices[d][choice[d]]);
    });
  }
  return true;
}

/// Zeros in disjoint boxes: the padding of each padded dimension, times what is filled of the padded dimensions before
/// it, times everything of the others. Local positions stand on both sides of these relations.
void Params::addPadding(Building &building) const {
  auto local = [](const Dimension &dimension, size_t rank, int64_t begin, int64_t end) {
    Segments result;
    for (size_t i = 0; i < dimension.shares.layers() && begin < end; ++i)
      for (Segment s : inverse(restrict(dimension.shares.layer(i)[rank], {{begin, begin, end - begin, 1, 0, 0}}))) {
        s.to = s.from;
        s.toStep = s.fromStep;
        result.push_back(s);
      }
    return ir::normalize(std::move(result));
  };
  for (size_t padded = 0; padded < building.dimensions.size(); ++padded) {
    if (building.dimensions[padded].padded == building.dimensions[padded].rows)
      continue;
    ir::Part part;
    for (unsigned share : building.param.instances)
      part.dimensions.push_back({share, -1});
    for (size_t d = 0; d < building.dimensions.size(); ++d) {
      const Dimension &dimension = building.dimensions[d];
      const bool filled = d < padded && dimension.padded != dimension.rows;
      ir::Share share{dimension.axes, {}};
      for (size_t r = 0; r < dimension.shares.at.size(); ++r)
        share.at.push_back(d == padded ? local(dimension, r, dimension.rows, dimension.padded)
                           : filled    ? local(dimension, r, 0, dimension.rows)
                                       : ir::identity(dimension.shares.lengths[r]));
      part.dimensions.push_back({placing_.intern(std::move(share)), static_cast<int>(d)});
    }
    building.param.parts.push_back(std::move(part));
  }
}

/// No product of a place's extents, in bytes over all instances, is past what a plan may hold; nor are the instances.
bool Params::checkSize(const Building &building) const {
  int64_t bytes = itemBytes(building.param.dtype), instances = 1;
  bool fits = true;
  auto multiply = [&](int64_t &product, int64_t by) {
    fits = fits && !__builtin_mul_overflow(product, by, &product) && product <= kMaxBytes;
  };
  for (const Dimension &dimension : building.dimensions)
    multiply(bytes, *std::max_element(dimension.shares.lengths.begin(), dimension.shares.lengths.end()));
  for (unsigned v : building.param.variables) {
    const std::vector<int64_t> &lengths = placing_.placed(v).shares.lengths;
    multiply(instances, *std::max_element(lengths.begin(), lengths.end()));
  }
  if (!fits || instances > kMaxInstances) {
    diagnostics_.error(
        building.declaration.at,
        building.title() + " has " + (fits ? text(instances) : "more than 2^60") +
            (fits ? " instances on a rank, expected at most " + text(kMaxInstances) : " bytes or instances on a rank"));
    return false;
  }
  multiply(bytes, std::max<int64_t>(instances, 1));
  if (!fits)
    diagnostics_.error(building.declaration.at, building.title() + " has more than 2^60 bytes on a rank");
  return fits;
}

} // namespace reshard
