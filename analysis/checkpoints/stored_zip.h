// SPDX-License-Identifier: Apache-2.0
// The members of a zip archive without compression, as torch.save writes it.
#pragma once

#include "support/status.h"

#include <map>
#include <string>
#include <string_view>

namespace reshard::analysis {

/// The members by name: parts of `archive`, which must outlive the result. Refuses archives with compression or
/// encryption, members that lie outside the archive, and repeated names. `where` begins the errors.
Result<std::map<std::string_view, std::string_view>> readStoredZip(std::string_view archive, const std::string &where);

} // namespace reshard::analysis
