// SPDX-License-Identifier: Apache-2.0
// What commands show on a terminal only: colors, and the time of long work. Progress bars are in common.h.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace reshard::command {

/// A word that begins a message, "error:", "warning:" or "note:". It has a color if stderr is a terminal, unless
/// NO_COLOR is set and not empty, or TERM is "dumb".
std::string colored(std::string_view word);

/// Prints each text on stderr, after "note:".
void printNotes(const std::vector<std::string> &notes);

/// Prints the text of Diagnostics on stderr, with colored words.
void printDiagnostics(const std::string &text);

/// Shows on stderr for how long some work of unknown length has run: each second, on a terminal only.
class ElapsedLine {
public:
  explicit ElapsedLine(std::string what);
  ~ElapsedLine();
  ElapsedLine(const ElapsedLine &) = delete;
  ElapsedLine &operator=(const ElapsedLine &) = delete;

private:
  void show(const std::string &what);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_; // none if stderr is no terminal
};

} // namespace reshard::command
