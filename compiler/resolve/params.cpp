// SPDX-License-Identifier: Apache-2.0
// A param's name, presence, tensors and storage rule; then its dimensions, the parts that they make, and its padding.
// Flat buffers are in flat.cpp, explicit params in pieces.cpp.

#include "compiler/resolve/params.h"

#include "base/text.h"
#include "compiler/frontend/reading.h"
#include "compiler/resolve/steps.h"

#include <algorithm>

namespace reshard {

using ir::IndexBlock;
using ir::IndexMap;

namespace {

std::string text(int64_t number) { return std::to_string(number); }

/// Calls visit(choice) for each combination with 0 <= choice[i] < sizes[i].
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

/// The rows of a tensor that are in one unit of `unit` rows of the joined array; `relation` maps tensor rows to joined
/// rows. Its blocks must be made of whole units or lie within one; if they do neither, the unit is `all`, so that no
/// later pass splits the tensor.
int64_t unitOf(const IndexMap &relation, int64_t unit, int64_t all) {
  if (unit <= 1 || relation.empty())
    return 1;
  const IndexBlock &block = relation.front();
  const bool regular = relation.size() == 1 && block.from == 0;
  if (regular && block.to % unit == 0 && block.toStep % unit == 0 && (block.count == 1 || block.length % unit == 0))
    return unit;
  if (regular && block.count > 1 && unit % block.toStep == 0 && block.fromStep == block.length)
    return unit / block.toStep * block.length;
  return all;
}

} // namespace

void Params::add(const TensorDeclaration &declaration) {
  ParamDeclaration param;
  param.name = declaration.name;
  param.at = declaration.at;
  param.pack.at = declaration.at;
  param.pack.tensor = declaration.name;
  param.shard = declaration.shard;
  if (declaration.tied && param.shard.empty()) // a tied tensor without rules has the rules of the other
    if (const auto number = tensors_.find(declaration.name, declaration.at, diagnostics_))
      param.shard = tensors_.all()[tensors_.all()[*number].canonical].declaration->shard;
  add(param);
}

void Params::add(const ParamDeclaration &declaration) {
  if (declaration.when) {
    const auto holds = evaluate(*declaration.when, context_.names(), diagnostics_);
    if (!holds || *holds == 0) {
      checkAbsent(declaration);
      return;
    }
  }
  ParamDeclaration present = declaration;
  std::erase_if(present.shard, [&](const auto &rule) { return !context_.applies(rule.second); });
  if (present.pack.kind == Pack::Kind::flat && !present.pack.of.empty()) { // a flat buffer omits absent entries
    std::erase_if(present.pack.of, [&](const Pack &entry) {
      return (entry.kind == Pack::Kind::tensor && absent(entry)) ||
             (entry.when && evaluate(*entry.when, context_.names(), diagnostics_).value_or(0) == 0);
    });
    if (!present.pack.of.empty())
      buildByModelChunk(present);
  } else if (!allAbsent(present)) {
    buildByModelChunk(present);
  }
}

bool Params::absent(const Pack &tensor) const {
  const auto found = tensors_.find(tensor.tensor);
  return found && tensors_.all()[*found].absent;
}

/// Whether no tensor of the param exists (their `when` is 0). Reports an error if only some exist; the param is then
/// omitted, too.
bool Params::allAbsent(const ParamDeclaration &declaration) const {
  std::vector<const Pack *> packs = {&declaration.pack};
  std::string absent, present;
  for (size_t i = 0; i < packs.size(); ++i) {
    if (packs[i]->kind == Pack::Kind::tensor) {
      const auto tensor = tensors_.find(packs[i]->tensor);
      if (!tensor)
        return false; // readPack reports the error
      (tensors_.all()[*tensor].absent ? absent : present) = tensors_.name(*tensor);
    }
    for (const Pack &entry : packs[i]->of)
      packs.push_back(&entry);
  }
  if (!absent.empty() && !present.empty())
    diagnostics_.error(declaration.at, "param '" + declaration.name + "' exists for some of its tensors only: '" +
                                           present + "' exists, but not '" + absent + "', whose 'when' is 0");
  return !absent.empty();
}

/// Checks the tensor names of a param whose `when` is 0. The frontend has checked its axes and expressions.
void Params::checkAbsent(const ParamDeclaration &declaration) const {
  std::vector<const Pack *> packs = {&declaration.pack};
  for (size_t i = 0; i < packs.size(); ++i) {
    if (packs[i]->kind == Pack::Kind::tensor)
      tensors_.find(packs[i]->tensor, packs[i]->at, diagnostics_);
    for (const Pack &entry : packs[i]->of)
      packs.push_back(&entry);
  }
}

/// Builds a param of a layout with `chunks`. A param with the layers' variable in its name is in the module of each of
/// its values. Any other states by `at`, which counts virtual ranks here, in which modules it is: it becomes one param
/// for each.
void Params::buildByModelChunk(const ParamDeclaration &declaration) {
  const auto &modelChunks = context_.modelChunks();
  if (!modelChunks)
    return build(declaration);
  const auto &[variable, prefix, chunksAt] = modelChunks->names;
  const std::string title = "param '" + declaration.name + "'";
  if (declaration.name.find("{" + variable + ".chunk}") != std::string::npos)
    return diagnostics_.error(declaration.at, title + " has {" + variable +
                                                  ".chunk} in its name, expected it only in 'chunks' of the layout");
  ParamDeclaration one = declaration;
  one.prefix = prefix;
  if (declaration.name.find("{" + variable + "}") != std::string::npos ||
      declaration.name.find("{" + variable + ".local}") != std::string::npos)
    return build(one);
  for (const StackRule &stack : declaration.stacks)
    if (stack.variable == variable)
      return diagnostics_.error(stack.at, title + " stacks '" + variable + "', whose values are in " +
                                              text(modelChunks->count) + " chunks of a rank, expected {" + variable +
                                              "} or {" + variable + ".local} in its name");
  const auto at = std::find_if(one.presence.begin(), one.presence.end(),
                               [&](const auto &rule) { return rule.first == modelChunks->axis; });
  if (at == one.presence.end())
    return diagnostics_.error(declaration.at, title + " is in none of the " + text(modelChunks->count) +
                                                  " chunks of a rank, expected {" + variable +
                                                  ".local} in its name or 'at: {" + modelChunks->axis +
                                                  ": first}', 'last' or numbers");
  const auto stages = context_.coordinates(modelChunks->axis, at->second, modelChunks->ranks * modelChunks->count);
  if (!stages)
    return;
  std::map<int64_t, std::vector<Expression>> ranks; // by chunk
  for (int64_t stage : *stages)
    ranks[stage / modelChunks->ranks].push_back({text(stage % modelChunks->ranks), at->second.at});
  AxisRules inAnyChunk = one.presence;
  std::vector<Expression> &anywhere = inAnyChunk[at - one.presence.begin()].second.coordinates;
  anywhere.clear();
  for (const auto &[chunk, coordinates] : ranks)
    anywhere.insert(anywhere.end(), coordinates.begin(), coordinates.end());
  for (auto &[chunk, coordinates] : ranks) {
    at->second.coordinates = std::move(coordinates);
    one.prefix = prefix;
    one.prefix.replace(prefix.find('{'), prefix.find('}') - prefix.find('{') + 1, text(chunk));
    build(one, inAnyChunk);
  }
}

void Params::build(const ParamDeclaration &declaration, const AxisRules &inAnyChunk) {
  Building building{declaration, inAnyChunk, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  building.param.name = declaration.prefix + declaration.name;
  building.param.refresh = declaration.refresh;
  const std::string &path =
      diagnostics_.path(declaration.at.file); // without folders: a plan does not depend on where its files are
  building.param.origin = path.substr(path.find_last_of('/') + 1) + ":" + text(declaration.at.line);

  auto pack = readPack(declaration.pack, tensors_, context_.names(), diagnostics_);
  const bool named = readName(building), present = context_.coordinates(declaration.presence, building.param.presence);
  if (!pack || !named || !present)
    return;
  building.pack = std::move(*pack);
  building.leaves = leaves(building.pack);
  if (!checkTensors(building) || !checkDimensions(building))
    return;
  for (unsigned variable : building.param.variables)
    building.param.instances.push_back(context_.instanceSharding(variable, building.exists[variable]));
  const bool pieces = building.pack.kind == Pack::Kind::pieces;
  bool ok = !pieces || readPieces(building);
  for (size_t d = 0, rank = building.rank(); d < rank && !pieces; ++d)
    ok = shardDimension(building, static_cast<int64_t>(d)) && ok;
  if (!ok || !checkAxes(building) || !checkSize(building))
    return;
  if (pieces) {
    addPieces(building);
  } else if (building.pack.kind == Pack::Kind::flat) {
    if (!addFlatParts(building))
      return;
  } else {
    if (!addParts(building))
      return;
    addPadding(building);
  }
  endpoint_.params.push_back(std::move(building.param));
  locations_.push_back(declaration.at);
  forms_.push_back(building.form);
}

int Params::Building::stackAt(int64_t d) const {
  for (size_t i = 0; i < stacks.size(); ++i)
    if (declaration.stacks[i].dimension == d)
      return static_cast<int>(stacks[i]);
  return -1;
}

int64_t Params::Building::stackDimension(unsigned variable) const {
  const auto found = std::find(stacks.begin(), stacks.end(), variable);
  return found == stacks.end() ? -1 : declaration.stacks[found - stacks.begin()].dimension;
}

int64_t Params::Building::inPack(int64_t d) const {
  return d - std::count_if(declaration.stacks.begin(), declaration.stacks.end(),
                           [&](const StackRule &stack) { return stack.dimension < d; });
}

int64_t Params::Building::inParam(int64_t d) const {
  int64_t result = 0;
  while (stackAt(result) >= 0 || inPack(result) < d)
    ++result;
  return result;
}

/// Reads the index variables of the name, `{x}` or `{x.local}`, and of `stack`.
bool Params::readName(Building &building) const {
  std::vector<std::string> known;
  known.reserve(model_.variables.size());
  for (const ir::IndexVariable &variable : model_.variables)
    known.push_back(variable.name);
  bool ok = true;
  auto number = [&](const std::string &name, Location at) {
    const auto found = std::find(known.begin(), known.end(), name);
    if (found == known.end()) {
      diagnostics_.error(at, "unknown index variable '" + name + "'" + suggestion(name, known));
      ok = false;
    }
    return static_cast<unsigned>(found - known.begin());
  };
  auto &variables = building.param.variables;
  const std::string &name = building.declaration.name;
  for (size_t open = name.find('{'); open != std::string::npos; open = name.find('{', open + 1)) {
    const size_t end = std::min(name.find('}', open), name.size());
    std::string variable = name.substr(open + 1, end - open - 1);
    const std::string suffix = variable.substr(std::min(variable.find('.'), variable.size()));
    variable.resize(variable.size() - suffix.size());
    if (suffix == ".chunk") // the name has its variable a second time, as {x} or {x.local}
      continue;
    const unsigned v = number(variable, building.declaration.at);
    if (std::find(variables.begin(), variables.end(), v) != variables.end()) {
      diagnostics_.error(building.declaration.at,
                         building.title() + " has the index variable '" + variable + "' twice in its name");
      ok = false;
    }
    variables.push_back(v);
  }
  for (const StackRule &stack : building.declaration.stacks) {
    building.stacks.push_back(number(stack.variable, stack.at));
    if (ok && std::find(variables.begin(), variables.end(), building.stacks.back()) != variables.end()) {
      diagnostics_.error(stack.at, building.title() + " stacks '" + stack.variable + "', which is also in its name");
      ok = false;
    }
  }
  for (unsigned v : variables)
    if (ok && !context_.placement(v).shards.repeats.empty()) {
      diagnostics_.error(building.declaration.at, building.title() + ": the 'map' that places '" + known[v] +
                                                      "' lists a value twice for a rank, which only a stack can hold");
      ok = false;
    }
  return ok;
}

/// The storage rule of a param: its own, or else the endpoint's. The endpoint's `dtype` applies to floats, its
/// `quantize` to float matrices that match the globs.
StorageRule Params::formOf(const Building &building) const {
  StorageRule form = building.declaration.form;
  if (form.transform)
    return form;
  if (!form.convert)
    form.convert = form_.convert;
  const ir::DType type = building.param.dtype;
  const bool matrix = building.rank() >= 2,
             wide = type == ir::DType::fp32 || type == ir::DType::bf16 || type == ir::DType::fp16;
  auto any = [&](const std::vector<Glob> &globs) {
    return std::any_of(globs.begin(), globs.end(),
                       [&](const Glob &glob) { return matchesGlob(glob.text, building.declaration.name); });
  };
  if (!form.dtype && !form.quantize && form_.quantize && form_.quantize->format && matrix && wide &&
      (form_.quantize->only.empty() || any(form_.quantize->only)) && !any(form_.quantize->ignore))
    form.quantize = form_.quantize;
  if (!form.dtype && !(form.quantize && form.quantize->format) && castable(type))
    form.dtype = form_.dtype;
  if (!form.dtype && !form.quantize && form_.stored)
    if (const auto stored = form_.stored->of(building.declaration.name, model_.variables, diagnostics_))
      form.dtype.emplace(*stored, *form_.storedAt);
  return form;
}

/// Checks that all tensors have the param's index variables, the same values of them, and one dtype if none is stated.
/// Sets the param's dtype and storage rule.
bool Params::checkTensors(Building &building) const {
  building.exists.resize(model_.variables.size());
  bool ok = true;
  for (size_t i = 0; i < building.leaves.size(); ++i)
    ok = checkTensor(building, i) && ok;
  return setForm(building) && ok;
}

/// Checks one tensor. The first one determines the values of index variables and the dtype that the others must have.
bool Params::checkTensor(Building &building, size_t number) const {
  const PackTree *leaf = building.leaves[number], *first = number > 0 ? building.leaves[0] : nullptr;
  const ir::TensorPattern &pattern = tensors_.patternOf(leaf->tensor);
  const std::string tensor = "tensor '" + tensors_.name(leaf->tensor) + "'";
  bool ok = true;
  auto has = [](const std::vector<unsigned> &list, unsigned v) {
    return std::find(list.begin(), list.end(), v) != list.end();
  };
  auto report = [&](const std::string &message) { ok = refuse(leaf->at, message); };
  if ((building.leaves.size() > 1 || building.pack.kind == Pack::Kind::pieces) && tensors_.opaque(leaf->tensor))
    report(tensor + " is opaque and cannot be packed, expected a param of its own");
  const std::vector<unsigned> wanted = building.variables();
  for (unsigned v : wanted)
    if (!has(pattern.variables, v))
      report(building.title() + " has the index variable '" + model_.variables[v].name + "', which its " + tensor +
             " lacks");
  for (size_t i = 0; i < pattern.variables.size(); ++i) {
    const unsigned v = pattern.variables[i];
    const std::string &variable = model_.variables[v].name;
    IndexMap exists = pattern.exists[i];
    if (const auto where = building.declaration.where.find(variable); where != building.declaration.where.end())
      exists = dense(restrict(exists, valuesOf(where->second)));
    if (!has(wanted, v)) {
      report(tensor + " has the index variable '" + variable + "', which " + building.title() + " lacks: expected {" +
             variable + "} or {" + variable + ".local} in the name, or 'stack: " + variable + "'");
    } else if (!first) {
      building.exists[v] = std::move(exists);
    } else if (!sameFrom(building.exists[v], exists)) {
      const IndexMap less = difference(building.exists[v], exists), more = difference(exists, building.exists[v]);
      const std::string value = variable + " " + text((less.empty() ? more : less)[0].from);
      const std::string other = "tensor '" + tensors_.name(first->tensor) + "'";
      report(building.title() + " exists for some of its tensors only: for " + value + ", " +
             (less.empty() ? tensor + " exists, but not " + other : other + " exists, but not " + tensor));
    }
  }
  if (!building.declaration.form.dtype && first && pattern.dtype != tensors_.patternOf(first->tensor).dtype)
    report(tensor + " is " + ir::name(pattern.dtype) + ", expected " +
           ir::name(tensors_.patternOf(first->tensor).dtype) + " like tensor '" + tensors_.name(first->tensor) +
           "' of the same param");
  return ok;
}

/// Sets the dtype, the storage rule and the transform of a param.
bool Params::setForm(Building &building) const {
  building.param.dtype = tensors_.patternOf(building.leaves[0]->tensor).dtype;
  building.form = formOf(building);
  if (building.form.dtype)
    building.param.dtype = building.form.dtype->first;
  if (building.form.quantize && building.form.quantize->format && !checkQuantizedNames(building))
    return false;
  const auto &transform = building.form.transform;
  if (!transform)
    return true;
  building.param.transform = transform->first;
  if (!endpoint_.storage)
    return true;
  return refuse(transform->second, building.title() + " has the transform '" + transform->first + "', but the " +
                                       endpoint_.role +
                                       " is files, for which no caller runs transforms; 'ignore' omits the param");
}

/// Checks that the names of codes and scales have each index variable of the param once, as its own name does.
bool Params::checkQuantizedNames(const Building &building) const {
  if (building.param.variables.empty())
    return true;
  const QuantizeRule &rule = *building.form.quantize;
  bool ok = true;
  for (const auto &[key, pattern] : {std::pair("codes", &rule.codes), std::pair("scale", &rule.scale),
                                     std::pair("tensor_scale", &rule.tensorScale), std::pair("shape", &rule.shape)}) {
    int64_t count = 0;
    for (size_t at = pattern->find("{name}"); at != std::string::npos; at = pattern->find("{name}", at + 1))
      ++count;
    if (!pattern->empty() && count != 1)
      ok = refuse(rule.at, std::string("'") + key + "' of 'quantize' is '" + *pattern + "', which has {name} " +
                               (count == 0 ? "not at all" : text(count) + " times") + ", but the name of " +
                               building.title() + " has index variables, expected {name} once");
  }
  return ok;
}

/// Checks that the dimensions of `stack`, `shard` and `pad` exist.
bool Params::checkDimensions(const Building &building) const {
  const ParamDeclaration &declaration = building.declaration;
  const int64_t rank = static_cast<int64_t>(building.rank());
  bool ok = true;
  auto check = [&](bool holds, Location at, const std::string &message) {
    if (!holds)
      diagnostics_.error(at, message);
    ok = ok && holds;
  };
  if (building.pack.kind == Pack::Kind::flat && !declaration.stacks.empty())
    check(false, declaration.stacks[0].at, building.title() + " has 'stack' and 'flat', expected one of them");
  const std::string has = building.title() + " has " + text(rank) + (rank == 1 ? " dimension" : " dimensions");
  check(rank <= kMaxDimensions, declaration.at, has + ", expected at most " + text(kMaxDimensions));
  for (const StackRule &stack : declaration.stacks)
    check(stack.dimension < rank, stack.at,
          "'stack' makes dimension " + text(stack.dimension) + ", but " + has + " including it");
  for (const auto &[d, rule] : declaration.shard)
    check(d >= 0 && d < rank, rule.at, "'shard' of dimension " + text(d) + ", but " + has);
  for (const auto &[d, multiple] : declaration.pad)
    check(d >= 0 && d < rank, multiple.at, "'pad' of dimension " + text(d) + ", but " + has);
  return ok;
}

/// Pads and shards the next dimension.
bool Params::shardDimension(Building &building, int64_t d) const {
  const ParamDeclaration &declaration = building.declaration;
  const auto shard = declaration.shard.find(d);
  const auto pad = declaration.pad.find(d);
  const bool hasRule = shard != declaration.shard.end(), padded = pad != declaration.pad.end();
  Dimension &dimension = building.dimensions.emplace_back();
  dimension.stack = building.stackAt(d);
  const bool stacked = dimension.stack >= 0;
  const std::string title = "dimension " + text(d) + " of " + building.title();
  auto refuseRules = [&](const std::string &why) {
    return refuse(hasRule ? shard->second.at : pad->second.at,
                  std::string(hasRule ? "'shard'" : "'pad'") + " of " + title + why);
  };
  if (stacked && context_.placement(static_cast<unsigned>(dimension.stack)).hasRule) {
    const std::string &variable = model_.variables[dimension.stack].name;
    if (hasRule || padded)
      return refuseRules(", which stacks '" + variable + "', but '" + variable + "' is already placed over " +
                         context_.placement(static_cast<unsigned>(dimension.stack)).rule.over);
    return shardPlacedStack(building, dimension);
  }

  PackTree slots; // a stack whose variable is not placed: sharded like any dimension
  const PackTree &pack = stacked ? slots : building.pack;
  const int64_t inPack = stacked ? 0 : building.inPack(d);
  if (stacked) {
    slots.shape = {positionCount(building.exists[dimension.stack])};
    dimension.indexMaps = {dense(building.exists[dimension.stack])};
  } else if (pack.kind != Pack::Kind::flat) { // flat.cpp computes the positions of a flat buffer's entries
    dimension.indexMaps = joinedIndexMaps(pack, inPack);
  }
  dimension.rows = dimension.padded = pack.shape[inPack];
  if (padded && !padDimension(pad->second, dimension))
    return false;
  if (!stacked && tensors_.opaque(building.leaves[0]->tensor)) {
    dimension.unit = dimension.padded;
    if (hasRule || padded)
      return refuseRules(": it holds opaque tensor '" + tensors_.name(building.leaves[0]->tensor) +
                         "', which cannot be sharded or padded");
  }
  if (!hasRule) {
    dimension.shards.at = {ir::identity(dimension.padded)};
    dimension.shards.lengths = {dimension.padded};
    return true;
  }
  const auto rule = context_.rule(shard->second, "row");
  if (!rule)
    return false;
  const bool joined = declaration.joined || stacked;
  if (!joined && splitsEntries(pack, inPack)) {
    const std::string why = ", whose entries are sharded separately, expected 'cut: joined'";
    if (padded)
      return refuse(pad->second.at, "'pad' of " + title + why);
    if (hasLists(rule->scheme))
      return refuse(rule->at, "'" + rule->scheme.name + "' on " + title + why);
  }
  const DimensionSharding sharding{
      .d = inPack, .padded = dimension.padded, .scheme = rule->scheme, .ranks = rule->ranks, .joined = joined};
  return shardByRule(pack, sharding, *rule, title, dimension);
}

/// Pads a dimension to a multiple.
bool Params::padDimension(const Expression &multiple, Dimension &dimension) const {
  const auto value = evaluate(multiple, context_.names(), diagnostics_);
  if (!value)
    return false;
  if (*value < 1)
    return refuse(multiple.at, "'pad' to a multiple of " + text(*value) + ", expected at least 1");
  const int64_t rest = dimension.rows % *value;
  if (rest != 0 && *value - rest > kMaxRows - dimension.rows)
    return refuse(multiple.at, "'pad' to a multiple of " + text(*value) + " makes more than 2^60 rows");
  if (rest != 0)
    dimension.padded += *value - rest;
  return true;
}

bool Params::shardByRule(const PackTree &pack, const DimensionSharding &sharding, const ResolvedRule &rule,
                         const std::string &title, Dimension &dimension) const {
  llvm::Expected<DimensionShards> shards = reshard::shardDimension(pack, sharding);
  if (!shards)
    return refuse(rule.at, title + " over " + rule.over + ": " + toString(shards.takeError()));
  if (!shards->repeats.empty() && context_.source())
    return refuse(rule.at, title + ": 'map' lists a row twice for a rank, which only a target allows");
  dimension.axes = rule.axes;
  dimension.shards = std::move(*shards);
  const bool grouped = pack.kind == Pack::Kind::interleave && pack.dimension == sharding.d;
  dimension.unit = rule.scheme.unit > 0 ? rule.scheme.unit : grouped ? std::max<int64_t>(pack.groupRows(), 1) : 1;
  return true;
}

/// Shards the dimension of a stack whose variable is placed: slots in the order of the rule, without gaps for values
/// that have no tensor.
bool Params::shardPlacedStack(Building &building, Dimension &dimension) const {
  const EndpointContext::VariablePlacement &placement = context_.placement(static_cast<unsigned>(dimension.stack));
  const IndexMap &exists = building.exists[dimension.stack];
  dimension.indexMaps = {ir::identity(model_.variables[dimension.stack].size)};
  dimension.rows = dimension.padded = model_.variables[dimension.stack].size;
  dimension.axes = placement.rule.axes;
  DimensionShards &shards = dimension.shards = placement.shards;
  for (size_t r = 0; r < shards.at.size(); ++r) {
    std::vector<IndexMap *> layers = {&shards.at[r]};
    for (auto &repeats : shards.repeats)
      layers.push_back(&repeats[r]);
    IndexMap slots;
    for (IndexMap *layer : layers) {
      *layer = restrict(*layer, exists);
      const IndexMap used = inverse(*layer);
      slots.insert(slots.end(), used.begin(), used.end());
    }
    slots = dense(ir::normalize(std::move(slots)));
    for (IndexMap *layer : layers)
      *layer = compose(*layer, slots);
    shards.lengths[r] = positionCount(slots);
  }
  return true;
}

/// Checks that each axis shards at most one dimension, and none if it places an index variable of the param.
bool Params::checkAxes(const Building &building) const {
  const ParamDeclaration &declaration = building.declaration;
  std::vector<std::pair<std::string, std::string>> used; // axis, its use
  for (unsigned v : building.variables())
    for (const std::string &axis : context_.placement(v).rule.names)
      used.emplace_back(axis, "places '" + model_.variables[v].name + "'");
  bool ok = true;
  for (const auto &[d, rule] : declaration.shard) {
    const size_t before = used.size();
    for (const auto &[axis, at] : rule.axes) {
      for (size_t i = 0; i < before; ++i)
        if (used[i].first == axis) {
          diagnostics_.error(at, "axis '" + axis + "' cannot shard dimension " + text(d) + " of " + building.title() +
                                     ": it already " + used[i].second);
          ok = false;
          break;
        }
      used.emplace_back(axis, "shards dimension " + text(d));
    }
  }
  return ok;
}

/// Checks the number of instances on a mesh rank, and their bytes, against the limits of a plan.
bool Params::checkSize(const Building &building) const {
  int64_t bytes = itemBytes(building.param.dtype), instances = 1;
  bool fits = true;
  auto multiply = [&](int64_t &product, int64_t by) {
    fits = fits && !__builtin_mul_overflow(product, by, &product) && product <= kMaxBytes;
  };
  for (const Dimension &dimension : building.dimensions)
    multiply(bytes, *std::max_element(dimension.shards.lengths.begin(), dimension.shards.lengths.end()));
  for (unsigned v : building.param.variables) {
    const std::vector<int64_t> &lengths = context_.placement(v).shards.lengths;
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

ir::Extent Params::extentOf(const Dimension &dimension) {
  const std::vector<int64_t> &lengths = dimension.shards.lengths;
  if (std::all_of(lengths.begin(), lengths.end(), [&](int64_t length) { return length == lengths[0]; }))
    return {{}, {lengths[0]}};
  return {dimension.axes, lengths};
}

/// Adds a part for each tensor and each combination of layers. Without repeats in a `map` there is one layer.
bool Params::addParts(Building &building) const {
  for (const Dimension &dimension : building.dimensions)
    building.param.shape.push_back(extentOf(dimension));
  for (size_t leaf = 0; leaf < building.leaves.size(); ++leaf) {
    const unsigned patternNumber = tensors_.all()[building.leaves[leaf]->tensor].pattern;
    const ir::TensorPattern &pattern = tensors_.tensorPatterns()[patternNumber];
    std::vector<std::vector<ir::PartDimension>> choices;
    auto choose = [&](size_t d) { // the layers of a dimension, as shardings of the tensor
      const Dimension &dimension = building.dimensions[d];
      const IndexMap &relation = dimension.indexMaps[dimension.stack >= 0 ? 0 : leaf];
      for (size_t i = 0; i < dimension.shards.layers(); ++i) {
        ir::Sharding sharding{dimension.axes, dimension.shards.layer(i),
                              unitOf(relation, dimension.unit, dimension.padded)};
        if (relation != ir::identity(dimension.padded))
          for (IndexMap &indexMap : sharding.at)
            indexMap = compose(relation, indexMap);
        choices.back().push_back({context_.intern(std::move(sharding)), static_cast<int>(d)});
      }
    };
    for (size_t i = 0; i < pattern.variables.size(); ++i) {
      choices.emplace_back();
      if (const int64_t d = building.stackDimension(pattern.variables[i]); d >= 0)
        choose(d);
      else
        choices.back().push_back(
            {context_.instanceSharding(pattern.variables[i], building.exists[pattern.variables[i]]), -1});
    }
    const std::vector<int64_t> &permute = building.leaves[leaf]->permute;
    for (size_t t = 0; t < pattern.shape.size(); ++t) {
      choices.emplace_back();
      const size_t packed = std::find(permute.begin(), permute.end(), static_cast<int64_t>(t)) - permute.begin();
      choose(building.inParam(static_cast<int64_t>(packed)));
    }
    std::vector<size_t> sizes;
    size_t combinations = 1;
    constexpr size_t kMaxParts = 1 << 12;
    for (const auto &list : choices) {
      sizes.push_back(list.size());
      combinations = std::min(combinations * list.size(), kMaxParts + 1);
    }
    if (combinations > kMaxParts) {
      diagnostics_.error(building.declaration.at, building.title() + " holds a row more than " + text(kMaxParts) +
                                                      " times, expected fewer repeats in 'map'");
      return false;
    }
    forEachChoice(sizes, [&](const std::vector<size_t> &choice) {
      ir::Part &part = building.param.parts.emplace_back();
      part.pattern = static_cast<int>(patternNumber);
      for (size_t d = 0; d < choice.size(); ++d)
        part.dimensions.push_back(choices[d][choice[d]]);
    });
  }
  return true;
}

/// Adds parts of zeros that are disjoint product sets: for each padded dimension its padding, times the rows without
/// padding of the padded dimensions before it, times all rows of the others. Their index maps relate local positions to
/// themselves.
void Params::addPadding(Building &building) const {
  auto local = [](const Dimension &dimension, size_t rank, int64_t begin, int64_t end) {
    IndexMap result;
    for (size_t i = 0; i < dimension.shards.layers() && begin < end; ++i)
      for (IndexBlock s : inverse(restrict(dimension.shards.layer(i)[rank], {{begin, begin, end - begin, 1, 0, 0}}))) {
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
    for (unsigned sharding : building.param.instances)
      part.dimensions.push_back({sharding, -1});
    for (size_t d = 0; d < building.dimensions.size(); ++d) {
      const Dimension &dimension = building.dimensions[d];
      const bool filled = d < padded && dimension.padded != dimension.rows;
      ir::Sharding sharding{dimension.axes, {}};
      for (size_t r = 0; r < dimension.shards.at.size(); ++r)
        sharding.at.push_back(d == padded ? local(dimension, r, dimension.rows, dimension.padded)
                              : filled    ? local(dimension, r, 0, dimension.rows)
                                          : ir::identity(dimension.shards.lengths[r]));
      part.dimensions.push_back({context_.intern(std::move(sharding)), static_cast<int>(d)});
    }
    building.param.parts.push_back(std::move(part));
  }
}

} // namespace reshard
