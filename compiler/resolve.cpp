// resolve: a Job → the layout IR, side by side, then what both sides must agree on. The work lies in families.cpp
// (tensors), placing.cpp (axes, index variables), params.cpp (names, packs, cuts), names.cpp and coverage.cpp (checks).

#include "compiler/choice.h"
#include "compiler/coverage.h"
#include "compiler/families.h"
#include "compiler/forms.h"
#include "compiler/names.h"
#include "compiler/params.h"
#include "compiler/placing.h"
#include "compiler/quantize.h"

#include <algorithm>

namespace reshard {

namespace {

std::string quoted(const std::vector<std::string> &names) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < names.size() && i < kShown; ++i)
    text += (i ? ", '" : "'") + names[i] + "'";
  return names.size() > kShown ? text + " and " + std::to_string(names.size() - kShown) + " more" : text;
}

/// `shard` and `place` of the model itself are for jobs without layouts.
void checkModelRules(const Job &job, Diagnostics &diagnostics) {
  const auto named = std::find_if(job.endpoints.begin(), job.endpoints.end(), [](const EndpointDeclaration &endpoint) {
    return endpoint.layoutDeclaration != nullptr;
  });
  if (named == job.endpoints.end())
    return;
  const std::string but = ", but the " + named->role + " has the layout '" + named->layoutDeclaration->name +
                          "', expected the rules in layouts alone";
  for (const TensorDeclaration &tensor : job.model.tensors)
    for (const auto &[d, rule] : tensor.shard)
      diagnostics.error(rule.at, "'shard' of tensor '" + tensor.name + "'" + but);
  for (const auto &[variable, rule] : job.model.place)
    diagnostics.error(rule.at, "'place' of the model" + but);
}

/// No two tensors have one full name.
void checkTensors(const Tensors &tensors, const ir::Layout &layout, Diagnostics &diagnostics) {
  std::vector<ir::Family> names; // with tied ones
  std::vector<Location> at;
  for (const Tensors::Tensor &tensor : tensors.all()) {
    if (tensor.absent)
      continue;
    ir::Family &family = names.emplace_back(tensors.families()[tensor.family]);
    if (tensor.declaration->tied) { // the other's values, in the order of this one's name
      const ir::Family other = family;
      family.variables.clear();
      family.exists.clear();
      for (const std::string &name : tensor.declaration->variables)
        for (size_t i = 0; i < other.variables.size(); ++i)
          if (layout.variables[other.variables[i]].name == name) {
            family.variables.push_back(other.variables[i]);
            family.exists.push_back(other.exists[i]);
          }
    }
    family.name = tensor.declaration->name;
    at.push_back(tensor.declaration->at);
  }
  checkTensorNames(layout, names, at, diagnostics);
}

/// Buffers of a rank, which may use every file of a storage endpoint, are numbered with 32 bits.
void checkInstances(const Job &job, const ir::Layout &layout, Diagnostics &diagnostics) {
  int64_t total = 0;
  for (const ir::Endpoint &endpoint : layout.endpoints)
    for (const ir::Param &param : endpoint.params) {
      int64_t most = endpoint.storage ? endpoint.places() : 1;
      for (unsigned share : param.instances) {
        int64_t values = 0;
        for (const ir::Segments &at : endpoint.shares[share].at)
          values = std::max(values, size(at));
        if (__builtin_mul_overflow(most, values, &most))
          most = kMaxParamInstances;
      }
      total += std::min(most, kMaxParamInstances);
      if (total >= kMaxParamInstances) {
        diagnostics.error(job.at, "a rank has " + std::to_string(total) + " params or more, expected less than " +
                                      std::to_string(kMaxParamInstances));
        return;
      }
    }
}

/// Every tensor of the target is one of the source; source tensors that no target takes are listed. With
/// --allow=missing, target params with other tensors are left out.
void matchSides(const Job &job, const std::vector<bool> &held, std::vector<std::vector<Location>> &paramsAt,
                std::vector<std::vector<StoredForm>> &forms, const Allowed &allowed, ir::Layout &layout,
                Diagnostics &diagnostics) {
  std::vector<bool> taken(layout.families.size());
  for (size_t e = 1; e < layout.endpoints.size(); ++e) {
    ir::Endpoint &target = layout.endpoints[e];
    std::vector<bool> out(target.params.size());
    for (size_t p = 0; p < target.params.size(); ++p)
      for (const ir::Part &part : target.params[p].parts) {
        if (part.family < 0)
          continue;
        const ir::Family &family = layout.families[part.family];
        const bool known = taken[part.family];
        taken[part.family] = !allowed.missing || held[part.family];
        const bool elements =
            std::none_of(family.shape.begin(), family.shape.end(), [](int64_t n) { return n == 0; }) &&
            std::none_of(family.exists.begin(), family.exists.end(), [](const auto &e) { return e.empty(); });
        if (known || held[part.family] || !elements)
          continue;
        const std::string message = target.role + " param '" + target.params[p].name + "' holds tensor '" +
                                    family.name + "', which no param of the source holds";
        if (allowed.missing) {
          if (!out[p])
            diagnostics.warning(paramsAt[e][p], message + "; it is left out");
          out[p] = true;
          continue;
        }
        diagnostics.error(paramsAt[e][p], message);
        const EndpointDeclaration &source = job.endpoints[0];
        diagnostics.note(source.layout ? source.layout->second : source.at,
                         source.layout ? "the source has the layout '" + source.layout->first + "'"
                                       : "the source is here");
      }
    size_t kept = 0;
    for (size_t p = 0; p < target.params.size(); ++p) {
      if (out[p]) {
        target.leftOut.push_back(target.params[p].name);
      } else if (kept++ < p) {
        target.params[kept - 1] = std::move(target.params[p]);
        paramsAt[e][kept - 1] = paramsAt[e][p];
        forms[e][kept - 1] = forms[e][p];
      }
    }
    target.params.resize(kept);
    paramsAt[e].resize(kept);
    forms[e].resize(kept);
  }
  for (size_t f = 0; f < layout.families.size(); ++f)
    if (held[f] && !taken[f])
      layout.untaken.push_back(layout.families[f].name);
  if (!layout.untaken.empty())
    diagnostics.warning(job.endpoints[1].at, "no target takes " + std::to_string(layout.untaken.size()) +
                                                 " of the source's tensors: " + quoted(layout.untaken));
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
  layout.families = tensors.families();
  checkTensors(tensors, layout, diagnostics);
  checkModelRules(job, diagnostics);

  std::vector<std::vector<Location>> paramsAt;
  std::vector<std::vector<StoredForm>> forms;
  for (const EndpointDeclaration &declaration : job.endpoints) {
    ir::Endpoint endpoint;
    endpoint.role = declaration.role;
    endpoint.layout = declaration.layoutDeclaration ? declaration.layoutDeclaration->name : "";
    endpoint.storage = declaration.storage;
    endpoint.directory = declaration.directory;
    endpoint.checkpoint = declaration.checkpoint;
    Placing placing(job, declaration, allowed, endpoint, diagnostics);
    Params params(job.model, tensors, placing, declaration.form, endpoint, diagnostics);
    std::vector<ParamDeclaration> declared = declaredParams(job, declaration, tensors, diagnostics);
    for (const ParamDeclaration &param : chosenParams(declaration, declared, endpoint.leftOut, diagnostics))
      params.add(param);
    layout.endpoints.push_back(std::move(endpoint));
    paramsAt.push_back(params.locations());
    forms.push_back(params.forms());
    checkParamNames(layout, layout.endpoints.back(), paramsAt.back(), {}, diagnostics);
  }
  // From here sides are compared: after errors they would look different where they are not.
  if (diagnostics.errors() > errorsBefore)
    return std::nullopt;
  settleForms(paramsAt, forms, layout, diagnostics);
  const std::vector<bool> held = checkSource(layout, paramsAt[0], allowed.gap, diagnostics);
  matchSides(job, held, paramsAt, forms, allowed, layout, diagnostics);
  warnOfMixedForms(paramsAt[0], forms[0], layout, diagnostics);
  quantizeParams(paramsAt, forms, layout, diagnostics);
  const bool good = diagnostics.errors() == errorsBefore;
  for (size_t e = 0; e < layout.endpoints.size() && good; ++e) { // scales have got names
    std::vector<std::string> titles;
    for (const StoredForm &form : forms[e])
      titles.push_back(form.title);
    checkParamNames(layout, layout.endpoints[e], paramsAt[e], titles, diagnostics);
  }
  checkInstances(job, layout, diagnostics);
  if (diagnostics.errors() > errorsBefore)
    return std::nullopt;
  return layout;
}

} // namespace reshard
