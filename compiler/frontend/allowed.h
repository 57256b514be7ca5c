// SPDX-License-Identifier: Apache-2.0
// Errors that `--allow` turns into warnings.
#pragma once

namespace reshard {

/// Errors that become warnings on request: `--allow=NAME,…`. The names are the names of the members.
struct Allowed {
  bool axis = false;    // an unknown axis: it gets size 1
  bool gap = false;     // elements of a tensor that no source rank holds, if no target needs them
  bool missing = false; // a target param with a tensor that the source does not hold: the param is omitted
};

} // namespace reshard
