#include "compiler/choice.h"
#include "compiler/reading.h"

#include <algorithm>

namespace reshard {

namespace {

/// A tensor as a param of its own name.
ParamDeclaration paramOf(const TensorDeclaration &tensor) {
  ParamDeclaration param;
  param.name = tensor.name;
  param.at = tensor.at;
  param.pack.at = tensor.at;
  param.pack.tensor = tensor.name;
  return param;
}

/// The params of a layout. Those without a `shard` of their own are cut as the first of the layout's globs that fits
/// says.
std::vector<ParamDeclaration> layoutParams(const Job &job, const LayoutDeclaration &layout, Diagnostics &diagnostics) {
  std::vector<ParamDeclaration> result = layout.params;
  if (layout.same)
    for (const TensorDeclaration &tensor : job.model.tensors)
      result.push_back(paramOf(tensor));
  std::vector<bool> used(layout.shard.size());
  for (ParamDeclaration &param : result)
    for (size_t i = 0; i < layout.shard.size() && param.shard.empty(); ++i)
      if (fits(layout.shard[i].first.text, param.name)) {
        used[i] = true;
        param.shard = layout.shard[i].second;
        break;
      }
  for (size_t i = 0; i < layout.shard.size(); ++i) {
    const Glob &glob = layout.shard[i].first;
    const bool any = std::any_of(result.begin(), result.end(),
                                 [&](const ParamDeclaration &param) { return fits(glob.text, param.name); });
    if (!used[i])
      diagnostics.error(glob.at, "'" + glob.text + "' in 'shard' of layout '" + layout.name + "' fits no param" +
                                     (any ? " that is left: others above it or a 'shard' of its own come first" : ""));
  }
  return result;
}

} // namespace

std::vector<ParamDeclaration> declaredParams(const Job &job, const EndpointDeclaration &endpoint,
                                             const Tensors &tensors, Diagnostics &diagnostics) {
  if (const LayoutDeclaration *layout = endpoint.layoutDeclaration)
    return layoutParams(job, *layout, diagnostics);
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
  for (const auto &[key, globs] : {std::pair("'only'", &endpoint.only), std::pair("'ignore'", &endpoint.ignore), std::pair("'only' of 'quantize'", &quantize.only),
                                   std::pair("'ignore' of 'quantize'", &quantize.ignore)})
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
