// Where in which file, and what is wrong there. All errors of a job are collected and reported in one go.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

/// A place in a source file. Line and column start at 1 (bytes); line 0: the job as a whole (no caret is shown).
struct Location {
  uint32_t file = 0; // as numbered by Diagnostics::addFile
  uint32_t line = 0;
  uint32_t column = 0;
};

/// Collects errors, warnings and their notes; prints them in LLVM's form: `file:line:col: error: …`, the line, a caret.
/// Messages are lower case without a full stop and say what was found and what was expected.
class Diagnostics {
public:
  enum class Kind { error, warning, note };

  uint32_t addFile(std::string path, std::string text);
  const std::string &path(uint32_t file) const { return files_[file].path; }
  const std::string &text(uint32_t file) const { return files_[file].text; }
  uint32_t files() const { return static_cast<uint32_t>(files_.size()); }

  void error(Location at, std::string message) { add(Kind::error, at, std::move(message)); }
  void warning(Location at, std::string message) { add(Kind::warning, at, std::move(message)); }
  /// Belongs to the error or warning before it.
  void note(Location at, std::string message) { add(Kind::note, at, std::move(message)); }

  /// How many errors so far. Errors past the hundredth are counted, not kept.
  size_t errors() const { return errors_; }
  bool ok() const { return errors_ == 0; }
  /// Whether the text of another error will be kept.
  bool hasRoom() const;

  /// Everything, in order of files and lines, each with its notes, then `N errors` where there are more than one.
  /// The same message at the same place is said and counted once.
  std::string text() const;

private:
  struct File {
    std::string path, text;
  };
  struct Message {
    Kind kind;
    Location at;
    std::string text;
  };
  void add(Kind kind, Location at, std::string message);

  std::vector<File> files_;
  std::vector<Message> messages_;
  size_t errors_ = 0, warnings_ = 0;
  bool recorded_ = false; // the last error or warning is in messages_, so that its notes belong there too
};

/// ", did you mean 'x'?" for the nearest of the known names, or, where none is near and there are few,
/// "; known here: a, b, c".
std::string suggestion(std::string_view name, const std::vector<std::string> &known);

} // namespace reshard
