// SPDX-License-Identifier: Apache-2.0
// Globs match by going back to the last star. The nearest name is the one with the least edit distance.
#include "base/text.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <iterator>

namespace reshard {

bool matchesGlob(std::string_view glob, std::string_view name) {
  size_t g = 0, n = 0, star = std::string_view::npos, resume = 0;
  while (n < name.size()) { // on a mismatch, only the last star needs to match one more character
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      resume = n;
    } else if (g < glob.size() && (glob[g] == '?' || glob[g] == name[n])) {
      ++g;
      ++n;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  return glob.find_first_not_of('*', g) == std::string_view::npos;
}

namespace {

constexpr size_t kMaxCompared = 200; // longer names are not compared, since time grows with the product of the lengths
constexpr size_t kMaxListed = 8;

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

} // namespace

Nearest::Nearest(std::string_view name) : name_(name), limit_(name.size() < 3 ? 1 : (name.size() + 2) / 3 + 1) {
  std::transform(name_.begin(), name_.end(), name_.begin(), lower);
}

void Nearest::offer(std::string_view known) {
  const size_t difference = std::max(known.size(), name_.size()) - std::min(known.size(), name_.size());
  if (difference >= limit_ || name_.size() > kMaxCompared || known.size() > kMaxCompared)
    return;
  row_.resize(known.size() + 1);
  for (size_t j = 0; j <= known.size(); ++j)
    row_[j] = j;
  for (size_t i = 1; i <= name_.size(); ++i) {
    size_t diagonal = row_[0];
    row_[0] = i;
    for (size_t j = 1; j <= known.size(); ++j) {
      const size_t above = row_[j];
      row_[j] = std::min({row_[j] + 1, row_[j - 1] + 1, diagonal + (name_[i - 1] != lower(known[j - 1]))});
      diagonal = above;
    }
  }
  if (row_.back() < limit_) {
    limit_ = row_.back();
    found_ = known;
  }
}

std::string suggestion(std::string_view name, const std::vector<std::string> &known) {
  Nearest nearest(name);
  for (const std::string &each : known)
    nearest.offer(each);
  if (std::string hint = nearest.hint(); !hint.empty() || known.empty() || known.size() > kMaxListed)
    return hint;
  std::string list;
  for (const std::string &each : known)
    list += (list.empty() ? "; known here: " : ", ") + each;
  return list;
}

namespace {

constexpr struct {
  std::string_view name;
  int64_t bytes;
} kUnits[] = {{"KiB", int64_t{1} << 10}, {"MiB", int64_t{1} << 20}, {"GiB", int64_t{1} << 30}, {"KB", 1'000},
              {"MB", 1'000'000},         {"GB", 1'000'000'000}};

} // namespace

std::string oneOf(const std::vector<std::string> &names, const std::string &quote) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? "" : i + 1 < names.size() ? ", " : " or ") + quote + names[i] + quote;
  return text;
}

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
