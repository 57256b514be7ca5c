// SPDX-License-Identifier: Apache-2.0
// Source locations and error messages. All errors of a job are collected and printed together. Characters of UTF-8.
#pragma once

#include "base/text.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace reshard {

/// A location in a source file. Line and column (in bytes) start at 1. Line 0 means the file as a whole: no source line
/// and caret are printed.
struct Location {
  uint32_t file = 0; // returned by Diagnostics::addFile
  uint32_t line = 0;
  uint32_t column = 0;
};

/// Collects errors, warnings and their notes; prints them in LLVM's form: `file:line:col: error: …`, the line, a caret.
/// Messages begin in lower case, have no full stop, and state what was found and what was expected.
class Diagnostics {
public:
  enum class Kind { error, warning, note };

  /// Adds a file that file `from` names; without `from`, nothing names it.
  uint32_t addFile(std::string path, std::string text, std::optional<uint32_t> from = {});
  /// The file that names this one; the file itself if none does.
  uint32_t from(uint32_t file) const { return files_[file].from; }
  /// Texts, by path, that are read in place of files on disk.
  void provide(std::map<std::string, std::string> texts) { provided_ = std::move(texts); }
  /// Null: the file is on disk.
  const std::string *provided(const std::string &path) const;
  const std::string &path(uint32_t file) const { return files_[file].path; }
  const std::string &text(uint32_t file) const { return files_[file].text; }
  uint32_t files() const { return static_cast<uint32_t>(files_.size()); }

  void error(Location at, std::string message) { add(Kind::error, at, std::move(message)); }
  void warning(Location at, std::string message) { add(Kind::warning, at, std::move(message)); }
  /// Adds a note to the previous error or warning.
  void note(Location at, std::string message) { add(Kind::note, at, std::move(message)); }

  /// The number of errors so far. From the 101st on, errors are counted but their texts are dropped.
  size_t errors() const { return errors_; }
  bool ok() const { return errors_ == 0; }
  /// False if the text of a further error would be dropped.
  bool hasRoom() const;

  /// All messages with their notes, sorted by file and line, then `N errors` if there is more than one. The same
  /// message at the same location is printed and counted once.
  std::string text() const;

private:
  struct File {
    std::string path, text;
    uint32_t from;
  };
  struct Diagnostic {
    Kind kind;
    Location at;
    std::string text;
  };
  void add(Kind kind, Location at, std::string message);

  std::vector<File> files_;
  std::map<std::string, std::string> provided_;
  std::vector<Diagnostic> diagnostics_;
  size_t errors_ = 0, warnings_ = 0;
  bool recorded_ = false; // the last error or warning was kept, so its notes are kept too
};

/// The number of bytes of the UTF-8 character at `at`, which is inside the text; 0 if it is invalid.
inline size_t utf8Bytes(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) -> unsigned {
    return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0;
  };
  const unsigned first = byte(0);
  if (first < 0x80)
    return 1;
  const size_t bytes = first >= 0xc2 && first <= 0xdf   ? 2
                       : first >= 0xe0 && first <= 0xef ? 3
                       : first >= 0xf0 && first <= 0xf4 ? 4
                                                        : 0;
  const unsigned least = first == 0xe0   ? 0xa0
                         : first == 0xf0 ? 0x90
                                         : 0x80, // the least and the greatest second byte
      most = first == 0xed   ? 0x9f
             : first == 0xf4 ? 0x8f
                             : 0xbf;
  for (size_t i = 1; i < bytes; ++i)
    if (byte(i) < (i == 1 ? least : 0x80) || byte(i) > (i == 1 ? most : 0xbf))
      return 0;
  return bytes;
}

} // namespace reshard
