// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "reshard/reshard.hpp"

#include <string>
#include <utility>

namespace reshard::tests {

/// Status and text of the reshard::Error that `body` throws; RESHARD_OK and no text if it throws none.
template <class Body> std::pair<int, std::string> thrown(Body body) {
  try {
    body();
  } catch (const Error &error) {
    return {error.status(), error.what()};
  }
  return {RESHARD_OK, ""};
}

} // namespace reshard::tests
