// SPDX-License-Identifier: Apache-2.0
// Text that people write and read: globs (docs/yaml.md, section 1), hints for misspelled names, sizes in bytes.
#pragma once

#include "base/status.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

/// Whether a glob matches a whole name: `*` matches any number of bytes, `?` one byte. Time is at most proportional to
/// the product of their lengths.
bool matchesGlob(std::string_view glob, std::string_view name);

/// Finds the offered name with the least edit distance (insertions, deletions and replacements; case is ignored), if
/// that is at most a third of the name's length, rounded up. A name of one or two characters has no near names but
/// those of other case, so that "ep" does not suggest "tp".
class Nearest {
public:
  explicit Nearest(std::string_view name);
  void offer(std::string_view known);
  /// ", did you mean 'x'?", or nothing.
  std::string hint() const { return found_.empty() ? "" : ", did you mean '" + found_ + "'?"; }

private:
  std::string name_; // in lower case
  size_t limit_;     // only names with fewer edits are accepted
  std::string found_;
  std::vector<size_t> row_;
};

/// A hint to append to an error about an unknown name: ", did you mean 'x'?" with the nearest known name; if none is
/// near, "; known here: a, b, c" for a short list, else "".
std::string suggestion(std::string_view name, const std::vector<std::string> &known);

/// One of these, for error and help texts: "'threads', 'mpi' or 'ucx'".
std::string oneOf(const std::vector<std::string> &names, const std::string &quote = "'");

/// "1.1 GiB", "512 B".
std::string humanBytes(double bytes);

/// Parses an integer, optionally with the unit KiB, MiB, GiB, KB, MB or GB: "512MiB", "64 KiB". The message of an error
/// is the text that was expected.
Result<int64_t> parseBytes(std::string_view text);

} // namespace reshard
