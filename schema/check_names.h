// Whether the names that a manifest gives tell its tensors, and the params of each place, apart.
#pragma once

#include "schema/plan_generated.h"

#include <cstdint>
#include <string>

namespace reshard::schema {

/// An error text, empty where they do. Tables by name, of tensors in the tools and of bound memory in the executor,
/// rely on it. The numbers of the manifest were checked before. `work` is added to, and the text is kTooMuch where it
/// goes beyond `most`.
std::string checkNames(const Manifest &manifest, int64_t &work, int64_t most);

inline constexpr const char *kTooMuch = "it is too large to be checked";

} // namespace reshard::schema
