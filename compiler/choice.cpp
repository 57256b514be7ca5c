#include "compiler/choice.h"
#include "compiler/reading.h"

#include <algorithm>

namespace reshard {

namespace {

/// Whether the param is a tensor without dimensions.
bool isScalar(const ParamDeclaration &param, const Tensors &tensors) {
  if (param.pack.kind != Pack::Kind::tensor || param.stack)
    return false;
  const auto tensor = tensors.find(param.pack.tensor);
  return tensor && !tensors.all()[*tensor].absent && tensors.familyOf(*tensor).shape.empty();
}

/// The params of a layout. Those without a `shard` of their own are cut as the first of the layout's globs that fits
/// says. A glob with wildcards that cuts a dimension does not fit scalars: `"*": {0: fsdp}` is meant for the others.
std::vector<ParamDeclaration> layoutParams(const Job &job, const LayoutDeclaration &layout, const Tensors &tensors,
                                           Diagnostics &diagnostics) {
  std::vector<ParamDeclaration> result = layout.params;
  if (layout.same)
    for (const TensorDeclaration &tensor : job.model.tensors)
      result.push_back(paramOf(tensor));
  std::vector<bool> used(layout.shard.size()), cutsAny;
  for (const auto &[glob, rules] : layout.shard)
    cutsAny.push_back(!rules.empty() && glob.text.find_first_of("*?") != std::string::npos);
  std::vector<bool> scalar;
  for (const ParamDeclaration &param : result)
    scalar.push_back(!layout.shard.empty() && isScalar(param, tensors));
  for (size_t p = 0; p < result.size(); ++p)
    for (size_t i = 0; i < layout.shard.size() && !result[p].ownShard; ++i)
      if (fits(layout.shard[i].first.text, result[p].name) && !(scalar[p] && cutsAny[i])) {
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
      if (fits(glob.text, result[p].name))
        (scalar[p] && cutsAny[i] ? scalars : others) = true;
    diagnostics.error(glob.at, "'" + glob.text + "' in 'shard' of layout '" + layout.name + "' fits no param" +
                                   (others    ? " that is left: others above it or a 'shard' of its own come first"
                                    : scalars ? " but scalars, which have no dimension to cut"
                                              : ""));
  }
  return result;
}

} // namespace

std::vector<ParamDeclaration> declaredParams(const Job &job, const EndpointDeclaration &endpoint,
                                             const Tensors &tensors, Diagnostics &diagnostics) {
  if (const LayoutDeclaration *layout = endpoint.layoutDeclaration)
    return layoutParams(job, *layout, tensors, diagnostics);
  std::vector<ParamDeclaration> result;
  for (const Tensors::Tensor &tensor : tensors.all()) {
    const TensorDeclaration &declaration = *tensor.declaration;
    ParamDeclaration &param = result.emplace_back(paramOf(declaration));
    param.shard = declaration.shard;
    if (declaration.tied && param.shard.empty()) // a tied tensor that says nothing is sharded like the other
      param.shard = tensors.all()[tensor.canonical].declaration->shard;
  }
  return result;
}

std::vector<ParamDeclaration> chosenParams(const EndpointDeclaration &endpoint, std::vector<ParamDeclaration> params,
                                           std::vector<std::string> &leftOut, Diagnostics &diagnostics) {
  auto any = [](const std::vector<Glob> &globs, const std::string &name) {
    return std::any_of(globs.begin(), globs.end(), [&](const Glob &glob) { return fits(glob.text, name); });
  };
  const QuantizeRule quantize = endpoint.form.quantize.value_or(QuantizeRule());
  for (const auto &[key, globs] :
       {std::pair("'only'", &endpoint.only), std::pair("'ignore'", &endpoint.ignore),
        std::pair("'only' of 'quantize'", &quantize.only), std::pair("'ignore' of 'quantize'", &quantize.ignore)})
    for (const Glob &glob : *globs)
      if (std::none_of(params.begin(), params.end(), [&](const auto &param) { return fits(glob.text, param.name); }))
        diagnostics.error(glob.at, "'" + glob.text + "' in " + key + " fits no param of the " + endpoint.role);
  std::erase_if(params, [&](const ParamDeclaration &param) {
    const bool out = (!endpoint.only.empty() && !any(endpoint.only, param.name)) || any(endpoint.ignore, param.name);
    if (out)
      leftOut.push_back(param.name);
    return out;
  });
  return params;
}

} // namespace reshard
