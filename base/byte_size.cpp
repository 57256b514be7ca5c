// SPDX-License-Identifier: Apache-2.0
#include "base/byte_size.h"

#include <charconv>
#include <cstdio>
#include <iterator>

namespace reshard {

namespace {

constexpr struct {
  std::string_view name;
  int64_t bytes;
} kUnits[] = {{"KiB", int64_t{1} << 10}, {"MiB", int64_t{1} << 20}, {"GiB", int64_t{1} << 30}, {"KB", 1'000},
              {"MB", 1'000'000},         {"GB", 1'000'000'000}};

} // namespace

std::string humanBytes(double bytes) {
  const char *units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(units)) {
    bytes /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
  return text;
}

Result<int64_t> parseBytes(std::string_view text) {
  int64_t unit = 1;
  for (const auto &[name, bytes] : kUnits)
    if (text.ends_with(name)) {
      unit = bytes;
      text.remove_suffix(name.size());
      text = text.substr(0, text.find_last_not_of(' ') + 1);
      break;
    }
  if (text.empty() || text.find_first_not_of("0123456789") != std::string_view::npos)
    return failed("a number of bytes (an integer, optionally with the unit KiB, MiB, GiB, KB, MB or GB)");
  int64_t count = 0;
  const auto error = std::from_chars(text.data(), text.data() + text.size(), count).ec;
  if (error != std::errc() || text[0] == '0' || count > INT64_MAX / unit)
    return failed("1 to 2^63 - 1 bytes without leading zeros");
  return count * unit;
}

} // namespace reshard
