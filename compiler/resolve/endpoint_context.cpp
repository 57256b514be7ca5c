// SPDX-License-Identifier: Apache-2.0
// Computes the coordinates of the axes, evaluates the expressions of an endpoint, and interns its shardings.
#include "compiler/resolve/endpoint_context.h"

#include "ir/ir.h"

#include <algorithm>
#include <numeric>

namespace reshard {

using ir::IndexBlock;
using ir::IndexMap;

namespace {

std::string counted(int64_t n, const char *noun) { return std::to_string(n) + " " + noun + (n == 1 ? "" : "s"); }

/// The number of values of each virtual rank under `first` and `last`, or `embedding` and `loss`.
llvm::Expected<std::vector<int64_t>> sizesOf(const Pipeline &p, int64_t n, int64_t ranks) {
  const int64_t v = p.interleave, stages = ranks * v;
  auto fail = [](const std::string &why) { return llvm::createStringError(why); };
  if (p.embedding || p.loss) {
    const int64_t e = p.embedding.value_or(0), l = p.loss.value_or(0);
    if (e < 0 || e > 1 || l < 0 || l > 1)
      return fail("'embedding' and 'loss' are " + std::to_string(e) + " and " + std::to_string(l) +
                  ", expected 0 or 1");
    if ((n + e + l) % stages != 0)
      return fail(counted(n, "value") + " and " + std::to_string(e + l) +
                  " for embedding and loss cannot be divided into " + counted(stages, "stage") + ": " +
                  std::to_string(stages) + " does not divide " + std::to_string(n + e + l));
    std::vector<int64_t> sizes(stages, (n + e + l) / stages);
    sizes.front() -= e;
    sizes.back() -= l;
    if (sizes.front() < 0 || sizes.back() < 0)
      return fail("found " + counted(n, "value") + ", too few for " + counted(stages, "stage") +
                  " with embedding and loss");
    return sizes;
  }
  if (ranks == 1)
    return fail("'first' and 'last' need at least 2 ranks, found 1");
  const int64_t others = ranks - p.first.has_value() - p.last.has_value();
  const int64_t rest = n - p.first.value_or(0) - p.last.value_or(0);
  if (p.first.value_or(0) < 0 || p.last.value_or(0) < 0 || rest < 0)
    return fail("'first' and 'last' are " + std::to_string(n - rest) +
                " values in all, expected each at least 0 and at most " + std::to_string(n) + " in all");
  if (others == 0 ? rest != 0 : rest % others != 0)
    return fail("'first' and 'last' leave " + counted(rest, "value") + ", which cannot be divided evenly over " +
                (others == 1 ? "the other rank" : std::to_string(others) + " other ranks"));
  std::vector<int64_t> each(ranks, others ? rest / others : 0);
  if (p.first)
    each.front() = *p.first;
  if (p.last)
    each.back() = *p.last;
  std::vector<int64_t> sizes;
  for (int64_t chunk = 0; chunk < v; ++chunk)
    for (int64_t rank : each) {
      if (rank % v != 0)
        return fail("a rank has " + counted(rank, "value") + ", expected a multiple of " + std::to_string(v) +
                    " ('interleave')");
      sizes.push_back(rank / v);
    }
  return sizes;
}

} // namespace

llvm::Expected<PipelineShards> applyPipeline(Scheme scheme, Pipeline pipeline, int64_t n, int64_t ranks) {
  if (pipeline.stages) {
    const int64_t stages = static_cast<int64_t>(pipeline.stages->size());
    if (stages % ranks != 0)
      return llvm::createStringError(counted(stages, "stage") + " over " + std::to_string(ranks) +
                                     " ranks, expected a multiple of " + std::to_string(ranks));
    const int64_t values = std::accumulate(pipeline.stages->begin(), pipeline.stages->end(), int64_t{0});
    if (values != n)
      return llvm::createStringError("'" + pipeline.key + "' has " + counted(values, "value") +
                                     " in all stages, expected " + std::to_string(n));
    pipeline.interleave = stages / ranks;
    scheme.numbers = *pipeline.stages;
    scheme.name = "sizes";
  } else if (pipeline.first || pipeline.last || pipeline.embedding || pipeline.loss) {
    llvm::Expected<std::vector<int64_t>> sizes = sizesOf(pipeline, n, ranks);
    if (!sizes)
      return sizes.takeError();
    scheme.numbers = std::move(*sizes);
    scheme.name = "sizes";
  }
  const int64_t modelChunks = pipeline.interleave;
  llvm::Expected<DimensionShards> stages = applyScheme(scheme, n, ranks * modelChunks, 1);
  if (!stages)
    return stages.takeError();
  PipelineShards result;
  result.modelChunks = modelChunks;
  result.local.resize(ranks);
  for (int64_t stage = 0; stage < ranks * modelChunks; ++stage)
    for (IndexBlock s : dense(stages->at[stage])) {
      s.to += stage / ranks * ir::kModelChunkStride;
      result.local[stage % ranks].push_back(s);
    }
  if (modelChunks == 1) {
    result.shards = std::move(*stages);
    return result;
  }
  result.shards.at.resize(ranks);
  result.shards.lengths.resize(ranks);
  result.shards.repeats.assign(stages->repeats.size(), std::vector<IndexMap>(ranks));
  for (int64_t stage = 0; stage < ranks * modelChunks; ++stage) {
    const int64_t rank = stage % ranks;
    for (size_t layer = 0; layer < stages->layers(); ++layer)
      for (IndexBlock s : stages->layer(layer)[stage]) {
        s.to += result.shards.lengths[rank];
        (layer == 0 ? result.shards.at : result.shards.repeats[layer - 1])[rank].push_back(s);
      }
    result.shards.lengths[rank] += stages->lengths[stage];
  }
  for (IndexMap &local : result.local)
    local = normalize(std::move(local));
  for (size_t layer = 0; layer < result.shards.layers(); ++layer)
    for (IndexMap &indexMap : layer == 0 ? result.shards.at : result.shards.repeats[layer - 1])
      indexMap = normalize(std::move(indexMap));
  return result;
}

using ir::IndexMap;

namespace {

bool contains(const std::vector<std::string> &list, const std::string &name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

/// `change` of each index map; adjacent equal ones, which are common, are changed once.
template <class Change> std::vector<IndexMap> mapEach(const std::vector<IndexMap> &indexMaps, Change change) {
  std::vector<IndexMap> result;
  result.reserve(indexMaps.size());
  for (size_t r = 0; r < indexMaps.size(); ++r)
    result.push_back(r > 0 && indexMaps[r] == indexMaps[r - 1] ? result.back() : change(indexMaps[r]));
  return result;
}

size_t hashOf(const ir::Sharding &sharding) {
  size_t hash = combineHash(ValueHash()(sharding.axes), sharding.unit);
  for (const IndexMap &indexMap : sharding.at)
    hash = combineHash(hash, static_cast<int64_t>(ValueHash()(indexMap)));
  return hash;
}

} // namespace

EndpointContext::EndpointContext(const Job &job, const EndpointDeclaration &declaration, const Allowed &allowed,
                                 ir::Endpoint &endpoint, Diagnostics &diagnostics)
    : declaration_(declaration), allowed_(allowed), endpoint_(endpoint), diagnostics_(diagnostics),
      placements_(job.model.variables.size()), instanceShardings_(job.model.variables.size()) {
  readAxes(job);
  const LayoutDeclaration *layout = declaration.layoutDeclaration;
  std::vector<std::string> variables;
  variables.reserve(job.model.variables.size());
  for (const ir::IndexVariable &variable : job.model.variables)
    variables.push_back(variable.name);
  for (const auto *rules : {layout ? &layout->placement : &job.model.placement, &declaration.placement})
    for (const auto &[name, rule] : *rules)
      if (!contains(variables, name))
        diagnostics.error(rule.at, "unknown index variable '" + name + "'" + suggestion(name, variables));
  for (unsigned v = 0; v < job.model.variables.size(); ++v)
    placeVariable(job, v);
  readModelChunks(job);
  coordinates(declaration.authority, endpoint.authority);
}

void EndpointContext::readAxes(const Job &job) {
  endpoint_.axes = declaration_.axes;
  endpoint_.ranks = declaration_.ranks;
  endpoint_.replicas = declaration_.replicas;
  const LayoutDeclaration *layout = declaration_.layoutDeclaration;
  listed_ = layout && layout->axes;
  if (listed_) {
    for (const auto &[name, at] : *layout->axes)
      known_.push_back(name);
  } else {
    for (const EndpointDeclaration &endpoint : job.endpoints)
      for (const ir::Axis &axis : endpoint.axes)
        if (!contains(known_, axis.name))
          known_.push_back(axis.name);
  }
  addNames(job);
}

/// Adds the names of axes and switches. A name that exists already is an error.
void EndpointContext::addNames(const Job &job) {
  names_ = job.model.let;
  const LayoutDeclaration *layout = declaration_.layoutDeclaration;
  for (const std::string &name : known_) {
    const auto axis = std::find_if(endpoint_.axes.begin(), endpoint_.axes.end(),
                                   [&](const ir::Axis &own) { return own.name == name; });
    if (names_.count(name) && (listed_ || axis != endpoint_.axes.end()))
      diagnostics_.error(listed_ ? layout->at : declaration_.meshAt,
                         "'" + name + "' is a name of 'let' and an axis, expected different names");
    names_[name] = axis == endpoint_.axes.end() ? 1 : axis->size;
  }
  for (const auto &[name, value] : declaration_.switches) {
    if (names_.count(name))
      diagnostics_.error(layout ? layout->at : declaration_.at,
                         "switch '" + name + "' has the name of an axis or of a 'let' value, expected another name");
    names_[name] = value;
  }
}

bool EndpointContext::applies(const ShardRule &rule) const {
  return !rule.when || evaluate(*rule.when, names_, diagnostics_).value_or(0) != 0;
}

std::optional<int> EndpointContext::axis(const std::string &name, Location at) const {
  if (!contains(known_, name) && allowed_.axis)
    return -1; // the frontend has warned
  if (!contains(known_, name)) {
    diagnostics_.error(at, listed_ ? "axis '" + name + "' is not one of the axes of layout '" +
                                         declaration_.layoutDeclaration->name + "'" + suggestion(name, known_)
                                   : "unknown axis '" + name + "'" + suggestion(name, known_));
    return std::nullopt;
  }
  for (size_t i = 0; i < endpoint_.axes.size(); ++i)
    if (endpoint_.axes[i].name == name)
      return static_cast<int>(i);
  return -1;
}

std::optional<ResolvedRule> EndpointContext::rule(const ShardRule &rule, const std::string &noun) const {
  bool ok = true;
  ResolvedRule result;
  result.at = rule.schemeAt.line ? rule.schemeAt : rule.at;
  for (const auto &[name, at] : rule.axes) {
    result.over += (result.over.empty() ? "" : ", ") + name;
    const auto number = axis(name, at);
    ok = ok && number;
    if (contains(result.names, name)) {
      diagnostics_.error(at, "axis '" + name + "' twice in one rule");
      ok = false;
    }
    result.names.push_back(name);
    if (!number || *number < 0 || endpoint_.axes[*number].size == 1)
      continue;
    result.axes.push_back(static_cast<unsigned>(*number));
    if (__builtin_mul_overflow(result.ranks, endpoint_.axes[*number].size, &result.ranks) || result.ranks > kMaxWorld) {
      diagnostics_.error(at, "the axes of one rule have more than " + std::to_string(kMaxWorld) + " ranks in all");
      return std::nullopt;
    }
  }
  if (rule.axes.size() > 1)
    result.over = "[" + result.over + "]";

  auto number = [&](const Expression &expression) {
    const auto value = evaluate(expression, names_, diagnostics_);
    ok = ok && value;
    return value.value_or(0);
  };
  result.scheme.name = rule.scheme;
  result.scheme.noun = noun;
  result.scheme.replicate = rule.replicate;
  for (const Expression &expression : rule.numbers)
    result.scheme.numbers.push_back(number(expression));
  for (const auto &list : rule.lists) {
    auto &values = result.scheme.lists.emplace_back();
    for (const Expression &expression : list)
      values.push_back(number(expression));
  }
  if (rule.unit) {
    result.scheme.unit = number(*rule.unit);
    if (ok && result.scheme.unit < 1) {
      diagnostics_.error(rule.unit->at, "'unit' is " + std::to_string(result.scheme.unit) + ", expected at least 1");
      ok = false;
    }
  }
  ok = readPipeline(rule, result.pipeline) && ok;
  return ok ? std::optional(std::move(result)) : std::nullopt;
}

bool EndpointContext::readPipeline(const ShardRule &rule, Pipeline &pipeline) const {
  bool ok = true;
  auto read = [&](const std::optional<Expression> &expression, std::optional<int64_t> &into) {
    if (!expression)
      return;
    into = evaluate(*expression, names_, diagnostics_);
    ok = ok && into;
  };
  std::optional<int64_t> interleave;
  read(rule.interleave, interleave);
  read(rule.first, pipeline.first);
  read(rule.last, pipeline.last);
  read(rule.embedding, pipeline.embedding);
  read(rule.loss, pipeline.loss);
  pipeline.interleave = interleave.value_or(1);
  pipeline.stages = rule.stages;
  pipeline.key = rule.stagesKey;
  if (ok && (pipeline.interleave < 1 || pipeline.interleave > kMaxIndexValues)) {
    diagnostics_.error(rule.interleave->at, "'interleave' is " + std::to_string(pipeline.interleave) +
                                                ", expected 1 to " + std::to_string(kMaxIndexValues));
    ok = false;
  }
  return ok;
}

std::optional<std::vector<int64_t>> EndpointContext::coordinates(const std::string &axis, const AxisCoordinates &rule,
                                                                 int64_t size) const {
  bool ok = true;
  std::vector<int64_t> list;
  Environment names = names_;
  names["first"] = 0;
  names["last"] = size - 1;
  for (const Expression &expression : rule.coordinates) {
    const auto value = evaluate(expression, names, diagnostics_);
    ok = ok && value;
    if (value && (*value < 0 || *value >= size)) {
      diagnostics_.error(expression.at, "coordinate " + std::to_string(*value) + " of axis '" + axis + "', expected " +
                                            (size == 1 ? "0: its size is 1" : "0 to " + std::to_string(size - 1)));
      ok = false;
    }
    list.push_back(value.value_or(0));
  }
  std::sort(list.begin(), list.end());
  list.erase(std::unique(list.begin(), list.end()), list.end());
  return ok ? std::optional(std::move(list)) : std::nullopt;
}

bool EndpointContext::coordinates(const AxisRules &rules, std::vector<ir::Presence> &presence) const {
  bool ok = true;
  for (const auto &[name, rule] : rules) {
    const auto number = axis(name, rule.at);
    const int64_t size = number.value_or(-1) < 0 ? 1 : endpoint_.axes[*number].size;
    auto list = number ? coordinates(name, rule, size) : std::nullopt;
    ok = ok && list;
    if (list && static_cast<int64_t>(list->size()) < size)
      presence.push_back({static_cast<unsigned>(*number), std::move(*list)});
  }
  return ok;
}

void EndpointContext::readModelChunks(const Job &job) {
  const LayoutDeclaration *layout = declaration_.layoutDeclaration;
  if (!layout || !layout->chunks)
    return;
  unsigned variable = 0;
  while (job.model.variables[variable].name != layout->chunks->variable)
    ++variable;
  const VariablePlacement &placement = placements_[variable];
  if (placement.modelChunks == 1)
    return;
  if (placement.rule.names.size() != 1) {
    diagnostics_.error(placement.rule.at, "index variable '" + layout->chunks->variable +
                                              "' is placed in several chunks over " + placement.rule.over +
                                              ", expected one axis, because layout '" + layout->name +
                                              "' has 'chunks'");
    return;
  }
  modelChunks_ = ModelChunks{*layout->chunks, placement.rule.names[0], placement.rule.ranks, placement.modelChunks};
}

unsigned EndpointContext::intern(ir::Sharding sharding) {
  if (std::all_of(sharding.at.begin(), sharding.at.end(),
                  [&](const IndexMap &other) { return other == sharding.at[0]; })) {
    sharding.axes.clear();
    sharding.at.resize(1);
  }
  const size_t hash = hashOf(sharding);
  for (auto [known, end] = shardings_.equal_range(hash); known != end; ++known)
    if (endpoint_.shardings[known->second] == sharding)
      return known->second;
  const unsigned number = static_cast<unsigned>(endpoint_.shardings.size());
  shardings_.emplace(hash, number);
  endpoint_.shardings.push_back(std::move(sharding));
  return number;
}

void EndpointContext::placeVariable(const Job &job, unsigned variable) {
  const ir::IndexVariable &known = job.model.variables[variable];
  const LayoutDeclaration *layout = declaration_.layoutDeclaration;
  const auto &rules = layout ? layout->placement : job.model.placement;
  const ShardRule *written = nullptr;
  if (const auto at = rules.find(known.name); at != rules.end())
    written = &at->second;
  // The endpoint's own rule replaces the layout's. It may use every axis of the mesh, also those that the layout does
  // not list.
  const std::vector<std::string> listed = known_;
  const Environment names = names_;
  if (const auto at = declaration_.placement.find(known.name); at != declaration_.placement.end()) {
    written = &at->second;
    for (const ir::Axis &axis : endpoint_.axes)
      if (!contains(known_, axis.name)) {
        known_.push_back(axis.name);
        names_.emplace(axis.name, axis.size);
      }
  }

  VariablePlacement &placement = placements_[variable];
  placement.shards.at = {ir::identity(known.size)};
  placement.shards.lengths = {known.size};
  placement.local = placement.shards.at;
  if (written && applies(*written))
    if (auto rule = this->rule(*written, "value"))
      applyRule(known, std::move(*rule), placement);
  known_ = listed;
  names_ = names;
  endpoint_.placement.push_back(intern({placement.rule.axes, placement.local}));
}

void EndpointContext::applyRule(const ir::IndexVariable &variable, ResolvedRule rule, VariablePlacement &placement) {
  const std::string title = "index variable '" + variable.name + "'";
  const int64_t chunks = rule.pipeline.stages ? 1 : rule.pipeline.interleave;
  if (chunks > kMaxWorld / rule.ranks)
    return diagnostics_.error(rule.at, title + " over " + rule.over + ": " + std::to_string(rule.ranks) +
                                           " ranks with " + std::to_string(chunks) + " chunks each, expected at most " +
                                           std::to_string(kMaxWorld) + " chunks in all");
  llvm::Expected<PipelineShards> shards = applyPipeline(rule.scheme, rule.pipeline, variable.size, rule.ranks);
  if (!shards)
    return diagnostics_.error(rule.at, title + " over " + rule.over + ": " + toString(shards.takeError()));
  placement.hasRule = true;
  placement.shards = std::move(shards->shards);
  placement.local = std::move(shards->local);
  placement.modelChunks = shards->modelChunks;
  placement.rule = std::move(rule);
  if (!placement.shards.repeats.empty() && source())
    diagnostics_.error(placement.rule.at, title + ": 'map' lists a value twice for a rank, which only a target allows");
}

unsigned EndpointContext::instanceSharding(unsigned variable, const IndexMap &exists) {
  const auto [at, added] = instanceShardings_[variable].try_emplace(exists);
  if (added) {
    const VariablePlacement &placement = placements_[variable];
    at->second =
        intern({placement.rule.axes,
                mapEach(placement.shards.at, [&](const IndexMap &slots) { return dense(restrict(slots, exists)); })});
  }
  return at->second;
}

} // namespace reshard
