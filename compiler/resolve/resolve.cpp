// SPDX-License-Identifier: Apache-2.0
// resolve: a Job → the layout IR: each endpoint by itself, then the checks and dtypes that concern both sides. Tensors
// are in tensors.cpp, axes and index variables in endpoint_context.cpp, params in params.cpp, checks in names.cpp and
// coverage.cpp, quantization in quantize.cpp.

#include "base/text.h"
#include "compiler/frontend/reading.h"
#include "compiler/resolve/endpoint_context.h"
#include "compiler/resolve/params.h"
#include "compiler/resolve/steps.h"
#include "compiler/resolve/tensors.h"

#include <algorithm>

namespace reshard {

namespace {

/// Whether the param is a tensor without dimensions.
bool isScalar(const ParamDeclaration &param, const Tensors &tensors) {
  if (param.pack.kind != Pack::Kind::tensor || !param.stacks.empty())
    return false;
  const auto tensor = tensors.find(param.pack.tensor);
  return tensor && !tensors.all()[*tensor].absent && tensors.patternOf(*tensor).shape.empty();
}

/// Applies `rename` of a layout: of the entries with which a name begins, the longest applies. Each entry must apply to
/// a param.
void rename(const LayoutDeclaration &layout, std::vector<ParamDeclaration> &params, Diagnostics &diagnostics) {
  const std::vector<NameBeginning> &entries = layout.rename;
  std::vector<bool> fits(entries.size()), used(entries.size());
  for (ParamDeclaration &param : params) {
    std::optional<size_t> longest;
    for (size_t i = 0; i < entries.size(); ++i)
      if (param.name.starts_with(entries[i].from)) {
        fits[i] = true;
        if (!longest || entries[i].from.size() > entries[*longest].from.size())
          longest = i;
      }
    if (!longest)
      continue;
    const NameBeginning &entry = entries[*longest];
    used[*longest] = true;
    if (entry.to.empty() && param.name == entry.from)
      diagnostics.error(entry.at, "'rename' of layout '" + layout.name + "' leaves nothing of the name '" + entry.from +
                                      "' of a param");
    else
      param.name.replace(0, entry.from.size(), entry.to);
  }
  for (size_t i = 0; i < entries.size(); ++i)
    if (!used[i])
      diagnostics.error(entries[i].at, "'" + entries[i].from + "' in 'rename' of layout '" + layout.name + "' begins " +
                                           (fits[i] ? "only names to which longer entries apply" : "no param's name"));
}

/// Replaces {param} and {state} in a text of `optimizer`.
std::string replaced(std::string text, const std::string &param, const std::string &state) {
  if (const size_t at = text.find("{state}"); at != std::string::npos)
    text.replace(at, 7, state);
  return text.replace(text.find("{param}"), 7, param);
}

/// Replaces the tensors of a pack by their states. Returns false if one of them has none: it is tied, opaque, a
/// buffer, or unknown, which is reported with the weight.
bool replaceByStates(Pack &pack, const OptimizerState &state, const Tensors &tensors) {
  if (pack.kind == Pack::Kind::tensor) {
    const auto weight = tensors.find(pack.tensor);
    const auto found = weight ? tensors.find(tensors.name(*weight) + "." + state.name) : std::nullopt;
    if (!found || tensors.all()[*found].declaration->state != state.name)
      return false;
    pack.tensor = tensors.name(*found);
  }
  return std::all_of(pack.of.begin(), pack.of.end(), [&](Pack &each) { return replaceByStates(each, state, tensors); });
}

/// Leaves a param the dimensions that it stacks, as 0, 1, …, with their rules.
void keepStacks(ParamDeclaration &param) {
  std::sort(param.stacks.begin(), param.stacks.end(),
            [](const StackRule &a, const StackRule &b) { return a.dimension < b.dimension; });
  std::map<int64_t, Expression> pad;
  std::map<int64_t, ShardRule> shard;
  for (size_t i = 0; i < param.stacks.size(); ++i) {
    const int64_t before = std::exchange(param.stacks[i].dimension, static_cast<int64_t>(i));
    if (const auto rule = param.pad.find(before); rule != param.pad.end())
      pad.emplace(i, rule->second);
    if (const auto rule = param.shard.find(before); rule != param.shard.end())
      shard.emplace(i, rule->second);
  }
  param.pad = std::move(pad);
  param.shard = std::move(shard);
  param.pack.permute.clear();
}

/// Renames the weights of a layout with `optimizer`, and adds the params of their states: as the weight, but in the
/// state's own dtype. A pack of several tensors has no scalar state.
void addStates(const Model &model, const LayoutDeclaration &layout, const Tensors &tensors,
               std::vector<ParamDeclaration> &params, Diagnostics &diagnostics) {
  if (!layout.optimizer)
    return;
  const OptimizerNames &names = *layout.optimizer;
  const size_t weights = params.size();
  for (const OptimizerState &state : model.states) {
    if (names.of && std::find(names.of->begin(), names.of->end(), state.name) == names.of->end())
      continue;
    for (size_t i = 0; i < weights; ++i) {
      ParamDeclaration param = params[i];
      if (!replaceByStates(param.pack, state, tensors) || (state.scalar && param.pack.kind != Pack::Kind::tensor))
        continue;
      if (param.form.transform) {
        diagnostics.error(names.at, "'optimizer': param '" + param.name + "' has the transform '" +
                                        param.form.transform->first + "', which does not apply to its states");
        return;
      }
      param.name = replaced(names.states, param.name, state.name);
      param.form = {};
      param.form.dtype.emplace(state.dtype, names.at);
      param.refresh.clear();
      if (state.scalar)
        keepStacks(param);
      params.push_back(std::move(param));
    }
  }
  for (size_t i = 0; i < weights; ++i)
    params[i].name = replaced(names.weights, params[i].name, "");
}

/// The params of a layout. A param without its own `shard` has the rules of the first of the layout's globs that
/// matches. A glob with wildcards that shards a dimension does not match scalars: `"*": {0: fsdp}` is for the other
/// params.
std::vector<ParamDeclaration> layoutParams(const Job &job, const LayoutDeclaration &layout, const Tensors &tensors,
                                           Diagnostics &diagnostics) {
  std::vector<ParamDeclaration> result = layout.params;
  if (layout.same)
    for (const TensorDeclaration &tensor : job.model.tensors)
      if (tensor.state.empty())
        result.push_back(paramOf(tensor));
  std::vector<bool> used(layout.shard.size()), skipsScalars;
  for (const auto &[glob, rules] : layout.shard)
    skipsScalars.push_back(!rules.empty() && glob.text.find_first_of("*?") != std::string::npos);
  std::vector<bool> scalar;
  scalar.reserve(result.size());
  for (const ParamDeclaration &param : result)
    scalar.push_back(!layout.shard.empty() && isScalar(param, tensors));
  for (size_t p = 0; p < result.size(); ++p)
    for (size_t i = 0; i < layout.shard.size() && !result[p].hasOwnSharding; ++i)
      if (matchesGlob(layout.shard[i].first.text, result[p].name) && !(scalar[p] && skipsScalars[i])) {
        used[i] = true;
        result[p].shard = layout.shard[i].second;
        break;
      }
  for (size_t i = 0; i < layout.shard.size(); ++i) {
    const Glob &glob = layout.shard[i].first;
    if (used[i])
      continue;
    bool scalars = false, others = false;
    for (size_t p = 0; p < result.size(); ++p)
      if (matchesGlob(glob.text, result[p].name))
        (scalar[p] && skipsScalars[i] ? scalars : others) = true;
    diagnostics.error(glob.at,
                      "'" + glob.text + "' in 'shard' of layout '" + layout.name + "' matches " +
                          (others    ? "only params that have rules already, from a glob above it or their own 'shard'"
                           : scalars ? "only scalars, which have no dimension to shard"
                                     : "no param"));
  }
  rename(layout, result, diagnostics);
  addStates(job.model, layout, tensors, result, diagnostics);
  return result;
}

/// The params of an endpoint's layout; with `params: same` or without a layout, each tensor under its own name.
std::vector<ParamDeclaration> declaredParams(const Job &job, const EndpointDeclaration &endpoint,
                                             const Tensors &tensors, Diagnostics &diagnostics) {
  if (const LayoutDeclaration *layout = endpoint.layoutDeclaration)
    return layoutParams(job, *layout, tensors, diagnostics);
  std::vector<ParamDeclaration> result;
  for (const Tensors::Tensor &tensor : tensors.all()) {
    const TensorDeclaration &declaration = *tensor.declaration;
    ParamDeclaration &param = result.emplace_back(paramOf(declaration));
    param.shard = declaration.shard;
    if (!declaration.state.empty())
      param.form.dtype.emplace(declaration.dtype, declaration.at);
    if (declaration.tied && param.shard.empty()) // a tied tensor without rules has the rules of the other
      param.shard = tensors.all()[tensor.canonical].declaration->shard;
  }
  return result;
}

/// The params that `only` and `ignore` select; the names of the others are appended to `omitted`. Reports globs that
/// match no param.
std::vector<ParamDeclaration> selectedParams(const EndpointDeclaration &endpoint, std::vector<ParamDeclaration> params,
                                             std::vector<std::string> &omitted, Diagnostics &diagnostics) {
  auto any = [](const std::vector<Glob> &globs, const std::string &name) {
    return std::any_of(globs.begin(), globs.end(), [&](const Glob &glob) { return matchesGlob(glob.text, name); });
  };
  const QuantizeRule quantize = endpoint.form.quantize.value_or(QuantizeRule());
  for (const auto &[key, globs] :
       {std::pair("'only'", &endpoint.only), std::pair("'ignore'", &endpoint.ignore),
        std::pair("'only' of 'quantize'", &quantize.only), std::pair("'ignore' of 'quantize'", &quantize.ignore)})
    for (const Glob &glob : *globs)
      if (std::none_of(params.begin(), params.end(),
                       [&](const auto &param) { return matchesGlob(glob.text, param.name); }))
        diagnostics.error(glob.at, "'" + glob.text + "' in " + key + " matches no param of the " + endpoint.role);
  std::erase_if(params, [&](const ParamDeclaration &param) {
    const bool out = (!endpoint.only.empty() && !any(endpoint.only, param.name)) || any(endpoint.ignore, param.name);
    if (out)
      omitted.push_back(param.name);
    return out;
  });
  return params;
}

std::string quoted(const std::vector<std::string> &names) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < names.size() && i < kShown; ++i)
    text += (i ? ", '" : "'") + names[i] + "'";
  return names.size() > kShown ? text + " and " + std::to_string(names.size() - kShown) + " more" : text;
}

/// Reports `shard` and `place` of the model itself in a job with layouts.
void checkModelRules(const Job &job, Diagnostics &diagnostics) {
  const auto named = std::find_if(job.endpoints.begin(), job.endpoints.end(), [](const EndpointDeclaration &endpoint) {
    return endpoint.layoutDeclaration != nullptr;
  });
  if (named == job.endpoints.end())
    return;
  const std::string but = ", but the " + named->role + " has the layout '" + named->layoutDeclaration->name +
                          "', expected the rules in layouts only";
  for (const TensorDeclaration &tensor : job.model.tensors)
    for (const auto &[d, rule] : tensor.shard)
      diagnostics.error(rule.at, "'shard' of tensor '" + tensor.name + "'" + but);
  for (const auto &[variable, rule] : job.model.placement)
    diagnostics.error(rule.at, "'place' of the model" + but);
}

/// Reports tensors with the same name.
void checkTensors(const Tensors &tensors, const ir::Layout &layout, Diagnostics &diagnostics) {
  std::vector<ir::TensorPattern> names; // with tied ones
  std::vector<Location> at;
  for (const Tensors::Tensor &tensor : tensors.all()) {
    if (tensor.absent)
      continue;
    ir::TensorPattern &pattern = names.emplace_back(tensors.tensorPatterns()[tensor.pattern]);
    if (tensor.declaration->tied) { // the values of the other, in the order of this one's variables
      const ir::TensorPattern other = pattern;
      pattern.variables.clear();
      pattern.exists.clear();
      for (const std::string &name : tensor.declaration->variables)
        for (size_t i = 0; i < other.variables.size(); ++i)
          if (layout.variables[other.variables[i]].name == name) {
            pattern.variables.push_back(other.variables[i]);
            pattern.exists.push_back(other.exists[i]);
          }
    }
    pattern.name = tensor.declaration->name;
    at.push_back(tensor.declaration->at);
  }
  checkTensorNames(layout, names, at, diagnostics);
}

/// Checks the number of buffers of a rank, which have 32-bit numbers. A rank may use every file of a storage endpoint.
void checkInstances(const Job &job, const ir::Layout &layout, Diagnostics &diagnostics) {
  int64_t total = 0;
  for (const ir::Endpoint &endpoint : layout.endpoints)
    for (const ir::Param &param : endpoint.params) {
      int64_t most = endpoint.storage ? endpoint.meshRanks() : 1;
      for (unsigned sharding : param.instances) {
        int64_t values = 0;
        for (const ir::IndexMap &at : endpoint.shardings[sharding].at)
          values = std::max(values, positionCount(at));
        if (__builtin_mul_overflow(most, values, &most))
          most = kMaxParamInstances;
      }
      total += std::min(most, kMaxParamInstances);
      if (total >= kMaxParamInstances) {
        diagnostics.error(job.at, "a rank has at least " + std::to_string(total) +
                                      " param instances, expected fewer than " + std::to_string(kMaxParamInstances));
        return;
      }
    }
}

/// The params of all endpoints: where each is declared, and its storage rule. By endpoint and param.
struct Declarations {
  std::vector<std::vector<Location>> at;
  std::vector<std::vector<StorageRule>> forms;
};

/// The inputs of matchSides().
struct Sides {
  const Job &job;
  const Allowed &allowed;
  const std::vector<bool> &held; // by tensor pattern: whether the source holds it
};

/// Whether a pattern has any element.
bool hasElements(const ir::TensorPattern &pattern) {
  return std::none_of(pattern.shape.begin(), pattern.shape.end(), [](int64_t n) { return n == 0; }) &&
         std::none_of(pattern.exists.begin(), pattern.exists.end(), [](const auto &e) { return e.empty(); });
}

/// Removes params of a target and appends their names to its omitted ones. `out`: by param, whether to remove it.
void omit(const std::vector<bool> &out, size_t e, ir::Endpoint &target, Declarations &declared) {
  size_t count = 0;
  for (size_t p = 0; p < target.params.size(); ++p) {
    if (out[p]) {
      target.omitted.push_back(target.params[p].name);
    } else if (count++ < p) {
      target.params[count - 1] = std::move(target.params[p]);
      declared.at[e][count - 1] = declared.at[e][p];
      declared.forms[e][count - 1] = declared.forms[e][p];
    }
  }
  target.params.resize(count);
  declared.at[e].resize(count);
  declared.forms[e].resize(count);
}

/// Checks that the source holds every tensor of the targets, and lists source tensors that no target uses. With
/// --allow=missing, target params with tensors that the source lacks are omitted.
void matchSides(const Sides &sides, Declarations &declared, ir::Layout &layout, Diagnostics &diagnostics) {
  std::vector<bool> used(layout.tensorPatterns.size());
  for (size_t e = 1; e < layout.endpoints.size(); ++e) {
    ir::Endpoint &target = layout.endpoints[e];
    std::vector<bool> out(target.params.size());
    for (size_t p = 0; p < target.params.size(); ++p)
      for (const ir::Part &part : target.params[p].parts) {
        if (part.pattern < 0)
          continue;
        const ir::TensorPattern &pattern = layout.tensorPatterns[part.pattern];
        const bool known = used[part.pattern];
        used[part.pattern] = !sides.allowed.missing || sides.held[part.pattern];
        if (known || sides.held[part.pattern] || !hasElements(pattern))
          continue;
        const std::string message = target.role + " param '" + target.params[p].name + "' holds tensor '" +
                                    pattern.name + "', which no param of the source holds";
        if (sides.allowed.missing) {
          if (!out[p])
            diagnostics.warning(declared.at[e][p], message + "; the param is omitted");
          out[p] = true;
          continue;
        }
        diagnostics.error(declared.at[e][p], message);
        const EndpointDeclaration &source = sides.job.endpoints[0];
        diagnostics.note(source.layout ? source.layout->second : source.at,
                         source.layout ? "the source has the layout '" + source.layout->first + "'"
                                       : "the source is here");
      }
    omit(out, e, target, declared);
  }
  for (size_t f = 0; f < layout.tensorPatterns.size(); ++f)
    if (sides.held[f] && !used[f])
      layout.unused.push_back(layout.tensorPatterns[f].name);
  if (!layout.unused.empty())
    diagnostics.warning(sides.job.endpoints[1].at, "no target uses " + std::to_string(layout.unused.size()) +
                                                       " of the source's tensors: " + quoted(layout.unused));
}

} // namespace

std::optional<ir::Layout> resolve(const Job &job, Diagnostics &diagnostics, const Allowed &allowed) {
  const size_t errorsBefore = diagnostics.errors();
  ir::Layout layout;
  layout.model = job.model.name;
  layout.world = job.world;
  layout.stagingLimit = job.stagingLimit;
  layout.topology = job.topology;
  layout.files.group = job.group;
  layout.files.exchange = job.exchange;
  layout.variables = job.model.variables;

  const Tensors tensors(job.model, diagnostics);
  layout.tensorPatterns = tensors.tensorPatterns();
  checkTensors(tensors, layout, diagnostics);
  checkModelRules(job, diagnostics);

  Declarations declared;
  for (const EndpointDeclaration &declaration : job.endpoints) {
    ir::Endpoint endpoint;
    endpoint.role = declaration.role;
    endpoint.layout = declaration.layoutDeclaration ? declaration.layoutDeclaration->name : "";
    endpoint.storage = declaration.storage;
    endpoint.directory = declaration.directory;
    endpoint.checkpoint = declaration.checkpoint;
    endpoint.format = declaration.format;
    EndpointContext context(job, declaration, allowed, endpoint, diagnostics);
    Params params(job.model, tensors, context, diagnostics);
    std::vector<ParamDeclaration> all = declaredParams(job, declaration, tensors, diagnostics);
    for (const ParamDeclaration &param : selectedParams(declaration, std::move(all), endpoint.omitted, diagnostics))
      params.add(param);
    declared.at.push_back(params.locations());
    declared.forms.push_back(params.forms());
    if (declaration.files && storesChunks(endpoint.format) && diagnostics.errors() == errorsBefore)
      placeStoredChunks(layout, tensors, context, {declared.at.back(), declared.forms.back()}, diagnostics);
    else if (!context.source() && writesChunks(endpoint.format) && diagnostics.errors() == errorsBefore)
      cutIntoChunks(tensors, context, declared.forms.back(), diagnostics);
    layout.endpoints.push_back(std::move(endpoint));
    checkParamNames(layout, layout.endpoints.back(), declared.at.back(), {}, diagnostics);
  }
  // The rest compares both sides. After an error, differences between them may only follow from it.
  if (diagnostics.errors() > errorsBefore)
    return std::nullopt;
  resolveStorageForms(declared.at, declared.forms, layout, diagnostics);
  const std::vector<bool> held = checkSourceCoverage(layout, declared.at[0], allowed.gap, diagnostics);
  matchSides({.job = job, .allowed = allowed, .held = held}, declared, layout, diagnostics);
  warnOnMixedForms(declared.at[0], declared.forms[0], layout, diagnostics);
  quantizeParams(declared.at, declared.forms, layout, diagnostics);
  const bool good = diagnostics.errors() == errorsBefore;
  for (size_t e = 0; e < layout.endpoints.size() && good; ++e) { // scales and views have names now
    std::vector<std::string> titles;
    for (const StorageRule &form : declared.forms[e])
      titles.push_back(form.title);
    checkParamNames(layout, layout.endpoints[e], declared.at[e], titles, diagnostics);
  }
  checkInstances(job, layout, diagnostics);
  if (diagnostics.errors() > errorsBefore)
    return std::nullopt;
  return layout;
}

} // namespace reshard
