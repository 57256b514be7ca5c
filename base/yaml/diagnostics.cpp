// SPDX-License-Identifier: Apache-2.0
// Collects and prints error messages. llvm::SourceMgr is not used, because it misplaces the caret after non-ASCII text
// and prints long lines and control characters unchanged.

#include "base/yaml/diagnostics.h"

#include <algorithm>
#include <tuple>

namespace reshard {

namespace {

constexpr size_t kMaxRecorded = 100; // errors; also warnings
constexpr size_t kMaxMessageBytes = 2000;
constexpr size_t kMaxLineBytes = 160; // a longer source line is clipped around the caret

/// Appends text with control characters and invalid UTF-8 replaced, so that each character takes one terminal column.
/// Returns the number of columns.
size_t appendPrintable(std::string &result, std::string_view text) {
  size_t columns = 0;
  for (size_t i = 0; i < text.size(); ++columns) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    const size_t bytes = utf8Bytes(text, i);
    const bool control =
        c < 0x20 || c == 0x7f || (c == 0xc2 && bytes == 2 && static_cast<unsigned char>(text[i + 1]) < 0xa0);
    if (c == '\t' || c == '\n')
      result += ' ';
    else if (control || bytes == 0)
      result += "\xef\xbf\xbd"; // U+FFFD
    else
      result += text.substr(i, bytes);
    i += std::max<size_t>(bytes, 1);
  }
  return columns;
}

/// The part of a source line that is printed, and the caret's column in it, from 0.
struct Excerpt {
  std::string_view text;
  size_t column = 0;
  bool clippedBefore = false, clippedAfter = false;
};

Excerpt excerpt(std::string_view line, size_t column) {
  Excerpt result{line, std::min(column, line.size())};
  if (line.size() <= kMaxLineBytes)
    return result;
  auto inside = [&](size_t i) { return i < line.size() && (static_cast<unsigned char>(line[i]) & 0xc0) == 0x80; };
  size_t begin = result.column > kMaxLineBytes / 2 ? result.column - kMaxLineBytes / 2 : 0;
  size_t end = std::min(begin + kMaxLineBytes, line.size());
  for (int i = 0; i < 3 && inside(begin); ++i)
    ++begin;
  for (int i = 0; i < 3 && inside(end); ++i)
    ++end;
  result.clippedBefore = begin > 0;
  result.clippedAfter = end < line.size();
  result.text = line.substr(begin, end - begin);
  result.column = std::max(result.column, begin) - begin;
  return result;
}

/// Finds lines of one text by number; fast for ascending numbers.
class Lines {
public:
  explicit Lines(std::string_view text) : text_(text) {}
  std::string_view line(uint32_t number) {
    if (number < number_) {
      number_ = 1;
      begin_ = 0;
    }
    for (; number_ < number; ++number_) {
      const size_t end = text_.find('\n', begin_);
      if (end == std::string_view::npos)
        return {};
      begin_ = end + 1;
    }
    std::string_view line = text_.substr(begin_, text_.find('\n', begin_) - begin_);
    if (line.ends_with('\r'))
      line.remove_suffix(1);
    return line;
  }

private:
  std::string_view text_;
  uint32_t number_ = 1;
  size_t begin_ = 0;
};

} // namespace

uint32_t Diagnostics::addFile(std::string path, std::string text, std::optional<uint32_t> from) {
  const uint32_t file = files();
  files_.push_back({std::move(path), std::move(text), from.value_or(file)});
  return file;
}

const std::string *Diagnostics::provided(const std::string &path) const {
  const auto found = provided_.find(path);
  return found == provided_.end() ? nullptr : &found->second;
}

void Diagnostics::add(Kind kind, Location at, std::string text) {
  if (kind == Kind::note && !recorded_)
    return;
  if (text.size() > kMaxMessageBytes) {
    text.resize(kMaxMessageBytes);
    text += " …";
  }
  if (kind != Kind::note) {
    recorded_ = false;
    for (const Diagnostic &known : diagnostics_)
      if (known.kind == kind && known.text == text && known.at.file == at.file && known.at.line == at.line &&
          known.at.column == at.column)
        return;
    size_t &count = kind == Kind::error ? errors_ : warnings_;
    recorded_ = count++ < kMaxRecorded;
  }
  if (recorded_)
    diagnostics_.push_back({kind, at, std::move(text)});
}

bool Diagnostics::hasRoom() const { return errors_ < kMaxRecorded; }

std::string Diagnostics::text() const {
  // A group is an error or warning with its notes.
  struct Group {
    size_t begin, end;
  };
  std::vector<Group> groups;
  for (size_t i = 0; i < diagnostics_.size(); ++i) {
    if (diagnostics_[i].kind != Kind::note)
      groups.push_back({i, i});
    groups.back().end = i + 1;
  }
  auto location = [&](const Group &group) {
    const Location &at = diagnostics_[group.begin].at;
    return std::tuple(at.file, at.line, at.column, group.begin);
  };
  std::sort(groups.begin(), groups.end(), [&](const Group &a, const Group &b) { return location(a) < location(b); });

  std::vector<Lines> lines;
  lines.reserve(files_.size());
  for (const File &file : files_)
    lines.emplace_back(file.text);
  std::string result;
  for (const Group &group : groups)
    for (size_t i = group.begin; i < group.end; ++i) {
      const Diagnostic &diagnostic = diagnostics_[i];
      const bool known = diagnostic.at.file < files_.size();
      if (known)
        appendPrintable(result, files_[diagnostic.at.file].path);
      if (known && diagnostic.at.line > 0)
        result += ":" + std::to_string(diagnostic.at.line) + ":" + std::to_string(diagnostic.at.column);
      if (known)
        result += ": ";
      result += diagnostic.kind == Kind::error ? "error: " : diagnostic.kind == Kind::warning ? "warning: " : "note: ";
      appendPrintable(result, diagnostic.text);
      result += '\n';
      if (!known || diagnostic.at.line == 0)
        continue;
      const Excerpt shown =
          excerpt(lines[diagnostic.at.file].line(diagnostic.at.line), std::max(diagnostic.at.column, 1u) - 1);
      result += shown.clippedBefore ? "… " : "";
      appendPrintable(result, shown.text);
      result += shown.clippedAfter ? " …\n" : "\n";
      std::string before;
      const size_t columns =
          appendPrintable(before, shown.text.substr(0, shown.column)) + (shown.clippedBefore ? 2 : 0);
      result += std::string(columns, ' ') + "^\n";
    }
  if (errors_ > kMaxRecorded)
    result += std::to_string(errors_) + " errors, the first " + std::to_string(kMaxRecorded) + " found are shown\n";
  else if (errors_ > 1)
    result += std::to_string(errors_) + " errors\n";
  return result;
}

} // namespace reshard
