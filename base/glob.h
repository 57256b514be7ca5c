// SPDX-License-Identifier: Apache-2.0
// The globs of the YAML and of the command line (docs/yaml.md, section 1).
#pragma once

#include <string_view>

namespace reshard {

/// Whether a glob matches a whole name: `*` matches any number of bytes, `?` one byte. Time is at most proportional to
/// the product of their lengths.
bool matchesGlob(std::string_view glob, std::string_view name);

} // namespace reshard
