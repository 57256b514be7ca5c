// SPDX-License-Identifier: Apache-2.0
// The sharding schemes of schemes.def as a table.
#pragma once

#include "base/text.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

/// The argument of a scheme: none, one expression, a list of expressions, a list of lists.
enum class SchemeArgument { none, number, numbers, lists };

struct SchemeRow {
  const char *name;
  SchemeArgument argument;
  bool replicates, contiguous; // as in schemes.def
};
#define SCHEME(name, argument, replicates, contiguous, help) {#name, SchemeArgument::argument, replicates, contiguous},
inline constexpr SchemeRow kSchemes[] = {
#include "compiler/frontend/schemes.def"
};
#undef SCHEME

/// Null if there is no scheme of that name.
inline const SchemeRow *findScheme(std::string_view name) {
  const auto *row = std::find_if(std::begin(kSchemes), std::end(kSchemes),
                                 [&](const SchemeRow &known) { return name == known.name; });
  return row == std::end(kSchemes) ? nullptr : row;
}

/// The names of the schemes with a property: "even, chunk or sizes".
inline std::string schemesWith(bool SchemeRow::*property) {
  std::vector<std::string> names;
  for (const SchemeRow &row : kSchemes)
    if (row.*property)
      names.emplace_back(row.name);
  return oneOf(names, "");
}

} // namespace reshard
