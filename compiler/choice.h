// Which params an endpoint declares, and which of them `only` and `ignore` leave.
#pragma once

#include "compiler/families.h"
#include "compiler/frontend.h"

#include <string>
#include <vector>

namespace reshard {

/// The params of an endpoint's layout; with `params: same` or without a layout, each tensor under its own name.
std::vector<ParamDeclaration> declaredParams(const Job &job, const EndpointDeclaration &endpoint,
                                             const Tensors &tensors, Diagnostics &diagnostics);

/// Those that `only` and `ignore` leave; the names of the others go to `leftOut`. Each glob must fit a param.
std::vector<ParamDeclaration> chosenParams(const EndpointDeclaration &endpoint, std::vector<ParamDeclaration> params,
                                           std::vector<std::string> &leftOut, Diagnostics &diagnostics);

} // namespace reshard
