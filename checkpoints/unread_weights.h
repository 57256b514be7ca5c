// SPDX-License-Identifier: Apache-2.0
// Weights in forms that are not read, for errors: what was found, and what makes a checkpoint of it.
#pragma once

#include <string>

namespace reshard::analysis {

/// A text that begins with "found", about a folder that is no checkpoint; empty if nothing in it is known.
std::string unreadWeights(const std::string &folder);

/// The same about a file, from its name and its first bytes: what it is, without "found".
std::string unreadFile(const std::string &path);

} // namespace reshard::analysis
