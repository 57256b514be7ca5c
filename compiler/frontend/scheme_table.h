// SPDX-License-Identifier: Apache-2.0
// The sharding schemes of schemes.def as a table.
#pragma once

#include <algorithm>
#include <iterator>
#include <string_view>

namespace reshard {

/// The argument of a scheme: none, one expression, a list of expressions, a list of lists.
enum class SchemeArgument { none, number, numbers, lists };

struct SchemeRow {
  const char *name;
  SchemeArgument argument;
};
#define SCHEME(name, argument, help) {#name, SchemeArgument::argument},
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

} // namespace reshard
