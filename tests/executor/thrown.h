// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "reshard/reshard.hpp"

#include <string>
#include <utility>

namespace reshard::tests {

/// Status and text of a reshard::Error.
using Thrown = std::pair<int, std::string>;

/// The reshard::Error that `body` throws; RESHARD_OK and no text if it throws none.
template <class Body> Thrown thrown(Body body) {
  try {
    body();
  } catch (const Error &error) {
    return {error.status(), error.what()};
  }
  return {RESHARD_OK, ""};
}

} // namespace reshard::tests
