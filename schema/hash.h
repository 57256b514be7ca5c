// A hash with the same value in every build, unlike std::hash.
#pragma once

#include <cstdint>
#include <string_view>

namespace reshard::schema {

/// XXH3-64.
uint64_t hashOf(std::string_view text);

} // namespace reshard::schema
