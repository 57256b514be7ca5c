// A param's names, presence and tensors; its dimensions are in cuts.cpp.

#include "compiler/params.h"

#include "compiler/forms.h"
#include "compiler/reading.h"

#include <algorithm>

namespace reshard {

using ir::Segments;

namespace {

std::string text(int64_t number) { return std::to_string(number); }

} // namespace

void Params::add(const TensorDeclaration &declaration) {
  ParamDeclaration param;
  param.name = declaration.name;
  param.at = declaration.at;
  param.pack.at = declaration.at;
  param.pack.tensor = declaration.name;
  param.shard = declaration.shard;
  if (declaration.tied && param.shard.empty()) // a tied tensor that says nothing is sharded like the other
    if (const auto number = tensors_.find(declaration.name, declaration.at, diagnostics_))
      param.shard = tensors_.all()[tensors_.all()[*number].canonical].declaration->shard;
  add(param);
}

void Params::add(const ParamDeclaration &declaration) {
  if (declaration.when) {
    const auto holds = evaluate(*declaration.when, placing_.names(), diagnostics_);
    if (!holds || *holds == 0) {
      checkAbsent(declaration);
      return;
    }
  }
  ParamDeclaration present = declaration;
  std::erase_if(present.shard, [&](const auto &rule) { return !placing_.holds(rule.second); });
  if (present.pack.kind == Pack::Kind::flat && !present.pack.of.empty()) { // a buffer simply lacks what is absent
    std::erase_if(present.pack.of, [&](const Pack &entry) {
      return (entry.kind == Pack::Kind::tensor && absent(entry)) ||
             (entry.when && evaluate(*entry.when, placing_.names(), diagnostics_).value_or(0) == 0);
    });
    if (!present.pack.of.empty())
      buildInModules(present);
  } else if (!allAbsent(present)) {
    buildInModules(present);
  }
}

/// A param of the variable of `chunks` stands in its value's module. Another says by `at`, which counts virtual ranks
/// there, in which ones it stands: it is a param of its own in each.
void Params::buildInModules(const ParamDeclaration &declaration) {
  const auto &modules = placing_.modules();
  if (!modules)
    return build(declaration);
  const auto &[variable, prefix, chunksAt] = modules->names;
  const std::string title = "param '" + declaration.name + "'";
  if (declaration.name.find("{" + variable + ".chunk}") != std::string::npos)
    return diagnostics_.error(declaration.at, title + " has {" + variable +
                                                  ".chunk} in its name, expected it in 'chunks' of the layout alone");
  ParamDeclaration one = declaration;
  one.prefix = prefix;
  if (declaration.name.find("{" + variable + "}") != std::string::npos ||
      declaration.name.find("{" + variable + ".local}") != std::string::npos)
    return build(one);
  if (declaration.stack && declaration.stack->first == variable)
    return diagnostics_.error(declaration.stack->second, title + " stacks '" + variable + "', whose values stand in " +
                                                             text(modules->chunks) +
                                                             " chunks of a rank, expected it in the name");
  const auto at =
      std::find_if(one.places.begin(), one.places.end(), [&](const auto &rule) { return rule.first == modules->axis; });
  if (at == one.places.end())
    return diagnostics_.error(declaration.at, title + " stands in none of the " + text(modules->chunks) +
                                                  " chunks of a rank, expected {" + variable +
                                                  ".local} in its name or 'at: {" + modules->axis +
                                                  ": first}', 'last' or numbers");
  const auto stages = placing_.coordinates(modules->axis, at->second, modules->ranks * modules->chunks);
  if (!stages)
    return;
  std::map<int64_t, std::vector<Expression>> ranks; // by chunk
  for (int64_t stage : *stages)
    ranks[stage / modules->ranks].push_back({text(stage % modules->ranks), at->second.at});
  for (auto &[chunk, coordinates] : ranks) {
    at->second.coordinates = std::move(coordinates);
    one.prefix = prefix;
    one.prefix.replace(prefix.find('{'), prefix.find('}') - prefix.find('{') + 1, text(chunk));
    build(one);
  }
}

bool Params::absent(const Pack &tensor) const {
  const auto found = tensors_.find(tensor.tensor);
  return found && tensors_.all()[*found].absent;
}

void Params::build(const ParamDeclaration &declaration) {
  Building building{declaration, {}, {}, {}, {}, -1, {}, {}};
  building.param.name = declaration.prefix + declaration.name;
  building.param.refresh = declaration.refresh;
  const std::string &path =
      diagnostics_.path(declaration.at.file); // without folders: plans do not depend on where files lie
  building.param.origin = path.substr(path.find_last_of('/') + 1) + ":" + text(declaration.at.line);

  auto pack = readPack(declaration.pack, tensors_, placing_.names(), diagnostics_);
  const bool named = readName(building), present = placing_.coordinates(declaration.places, building.param.presence);
  if (!pack || !named || !present)
    return;
  building.pack = std::move(*pack);
  building.leaves = leaves(building.pack);
  if (!checkTensors(building) || !checkDimensions(building))
    return;
  bool ok = true;
  for (size_t d = 0, rank = building.pack.shape.size() + (building.stack >= 0); d < rank; ++d)
    ok = cutDimension(building, static_cast<int64_t>(d)) && ok;
  if (!ok || !checkAxes(building) || !checkSize(building))
    return;
  for (unsigned variable : building.param.variables)
    building.param.instances.push_back(placing_.instances(variable, building.exists[variable]));
  if (building.pack.kind == Pack::Kind::flat) {
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

/// Whether none of the tensors exists (their `when` is 0). Some but not all is an error, and the param is left out too.
bool Params::allAbsent(const ParamDeclaration &declaration) const {
  std::vector<const Pack *> packs = {&declaration.pack};
  std::string absent, present;
  for (size_t i = 0; i < packs.size(); ++i) {
    if (packs[i]->kind == Pack::Kind::tensor) {
      const auto tensor = tensors_.find(packs[i]->tensor);
      if (!tensor)
        return false; // readPack says why
      (tensors_.all()[*tensor].absent ? absent : present) = tensors_.name(*tensor);
    }
    for (const Pack &component : packs[i]->of)
      packs.push_back(&component);
  }
  if (!absent.empty() && !present.empty())
    diagnostics_.error(declaration.at, "param '" + declaration.name +
                                           "' exists for some of its tensors only: there is '" + present +
                                           "' but not '" + absent + "', whose 'when' is 0");
  return !absent.empty();
}

/// Of a param that does not exist here: whether its tensors do (check_names.cpp looks at axes and expressions).
void Params::checkAbsent(const ParamDeclaration &declaration) const {
  std::vector<const Pack *> packs = {&declaration.pack};
  for (size_t i = 0; i < packs.size(); ++i) {
    if (packs[i]->kind == Pack::Kind::tensor)
      tensors_.find(packs[i]->tensor, packs[i]->at, diagnostics_);
    for (const Pack &component : packs[i]->of)
      packs.push_back(&component);
  }
}

/// The index variables of the name, `{x}` or `{x.local}`, and the one that is stacked.
bool Params::readName(Building &building) const {
  std::vector<std::string> known;
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
    if (suffix == ".chunk") // of a variable that the name has anyway
      continue;
    const unsigned v = number(variable, building.declaration.at);
    if (std::find(variables.begin(), variables.end(), v) != variables.end()) {
      diagnostics_.error(building.declaration.at,
                         building.title() + " has the index variable '" + variable + "' twice in its name");
      ok = false;
    }
    variables.push_back(v);
  }
  if (const auto &stack = building.declaration.stack) {
    building.stack = static_cast<int>(number(stack->first, stack->second));
    if (ok && std::find(variables.begin(), variables.end(), static_cast<unsigned>(building.stack)) != variables.end()) {
      diagnostics_.error(stack->second,
                         building.title() + " stacks '" + stack->first + "', which its name has as well");
      ok = false;
    }
  }
  for (unsigned v : variables)
    if (ok && !placing_.placed(v).shares.repeats.empty()) {
      diagnostics_.error(building.declaration.at, building.title() + ": '" + known[v] +
                                                      "' is placed by a map that gives a rank the " +
                                                      "same value twice, which only a stack can hold");
      ok = false;
    }
  return ok;
}

/// How a param is stored: as it says itself; or as the endpoint says of its floats, and of those that are matrices and
/// that globs fit.
StoredForm Params::formOf(const Building &building) const {
  StoredForm form = building.declaration.form;
  if (form.transform)
    return form;
  form.rounds = form.rounds || form_.rounds;
  const ir::DType type = building.param.dtype;
  const bool matrix = building.pack.shape.size() + (building.stack >= 0) >= 2,
             wide = type == ir::DType::fp32 || type == ir::DType::bf16 || type == ir::DType::fp16;
  auto any = [&](const std::vector<Glob> &globs) {
    return std::any_of(globs.begin(), globs.end(),
                       [&](const Glob &glob) { return fits(glob.text, building.declaration.name); });
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

/// All tensors have the param's index variables, the same values of them, and one dtype where none is stated.
bool Params::checkTensors(Building &building) const {
  std::vector<unsigned> wanted = building.param.variables;
  if (building.stack >= 0)
    wanted.push_back(static_cast<unsigned>(building.stack));
  building.exists.resize(model_.variables.size());
  bool ok = true;
  const PackTree *first = nullptr;
  for (const PackTree *leaf : building.leaves) {
    const ir::Family &family = tensors_.familyOf(leaf->tensor);
    const std::string tensor = "tensor '" + tensors_.name(leaf->tensor) + "'";
    auto has = [](const std::vector<unsigned> &list, unsigned v) {
      return std::find(list.begin(), list.end(), v) != list.end();
    };
    auto refuse = [&](const std::string &message) {
      diagnostics_.error(leaf->at, message);
      ok = false;
    };
    if (building.leaves.size() > 1 && tensors_.opaque(leaf->tensor))
      refuse(tensor + " is opaque, expected a param of its own");
    for (unsigned v : wanted)
      if (!has(family.variables, v))
        refuse(building.title() + " has the index variable '" + model_.variables[v].name + "', which its " + tensor +
               " lacks");
    for (size_t i = 0; i < family.variables.size(); ++i) {
      const unsigned v = family.variables[i];
      const std::string &variable = model_.variables[v].name;
      Segments exists = family.exists[i];
      if (const auto where = building.declaration.where.find(variable); where != building.declaration.where.end())
        exists = dense(restrict(exists, valuesOf(where->second)));
      if (!has(wanted, v)) {
        refuse(tensor + " has the index variable '" + variable + "', which " + building.title() + " lacks: expected {" +
               variable + "} or {" + variable + ".local} in the name, or 'stack: " + variable + "'");
      } else if (!first) {
        building.exists[v] = std::move(exists);
      } else if (!sameFrom(building.exists[v], exists)) {
        const Segments less = difference(building.exists[v], exists), more = difference(exists, building.exists[v]);
        const std::string value = variable + " " + text((less.empty() ? more : less)[0].from);
        const std::string other = "tensor '" + tensors_.name(first->tensor) + "'";
        refuse(building.title() + " exists for some of its tensors only: for " + value + " there is " +
               (less.empty() ? tensor + " but not " + other : other + " but not " + tensor));
      }
    }
    if (!building.declaration.form.dtype && first && family.dtype != tensors_.familyOf(first->tensor).dtype) {
      refuse(tensor + " is " + ir::name(family.dtype) + ", expected " +
             ir::name(tensors_.familyOf(first->tensor).dtype) + " as tensor '" + tensors_.name(first->tensor) +
             "' of the same param");
    }
    if (!first)
      first = leaf;
  }
  building.param.dtype = tensors_.familyOf(first->tensor).dtype;
  building.form = formOf(building);
  if (building.form.dtype)
    building.param.dtype = building.form.dtype->first;
  if (const auto &transform = building.form.transform) {
    building.param.transform = transform->first;
    if (endpoint_.storage) {
      diagnostics_.error(transform->second, building.title() + " has the transform '" + transform->first +
                                                "', but the " + endpoint_.role +
                                                " is files, which no caller converts; 'ignore' leaves it out");
      ok = false;
    }
  }
  return ok;
}

} // namespace reshard
