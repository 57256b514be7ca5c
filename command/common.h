// SPDX-License-Identifier: Apache-2.0
// Shared by all commands: exit codes, the exception that ends a command, messages, a clock, a progress line.
#pragma once

#include "base/status.h"

#include <cstdint>
#include <exception>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace reshard::command {

constexpr int kDone = 0;     // done
constexpr int kNegative = 1; // plans differ, or a check failed
constexpr int kUsage = 2;    // wrong usage or input
constexpr int kFailure = 3;  // a failure at run time

/// Ends a command with a message and an exit code.
struct Failure {
  int code;
  std::string message;
};

/// Throws Failure if `status` is an error: with kNegative or kFailure if it is `negative` or `timedOut`, else with
/// `code`.
inline void throwOnError(const Status &status, int code) {
  if (!status.ok())
    throw Failure{status.kind() == ErrorKind::negative ? kNegative
                  : status.timedOut()                  ? kFailure
                                                       : code,
                  status.message()};
}

/// The same, with kFailure if it is `failed`, else with kUsage.
inline void throwOnError(const Status &status) {
  throwOnError(status, !status.ok() && status.kind() == ErrorKind::failed ? kFailure : kUsage);
}

/// The value of a result, or as throwOnError() of the same arguments.
template <class T, class... Code> T valueOrThrow(Result<T> result, Code... code) {
  throwOnError(result.status(), code...);
  return std::move(*result);
}

/// Escapes control characters (for example in names from files) as \n, \r, \t or \xNN, so that the text is safe to
/// print on a terminal.
std::string printable(std::string_view text);

/// "1 round", "2 rounds"
std::string counted(uint64_t count, const std::string &what);

/// The patterns of names, `*` in place of each number between dots, with their counts: "layers.*.bias (2),
/// norm.weight". At most 8 patterns, and how many more there are.
std::string patternsOf(const std::set<std::string> &names);

/// Prints "name: error: message" on stderr, the message as printable().
void printError(const char *command, const std::string &message);

/// The error message for an exception that ends a command. `doing`: the activity it interrupted, such as " in pass
/// 'schedule'", or empty.
std::string explain(const std::exception &exception, const std::string &doing = {});

/// Runs a command and returns its exit code; prints the error of an exception that ends it.
int runCommand(const char *command, const std::function<int()> &run);

/// For a command whose plans need gigabytes: the allocator keeps freed memory and grows by large pages. Faults of pages
/// of 4 KiB, and returning memory between two passes, would be an eighth of the time of a job of thousands of ranks.
void expectLargeHeap();

/// The peak resident memory of this process so far, in bytes.
uint64_t peakRssBytes();

/// The time of a steady clock, in seconds.
double now();

/// A progress bar on stderr, without colors. It is shown only on a terminal, and only after one second.
class ProgressLine {
public:
  explicit ProgressLine(std::string what);
  ~ProgressLine();
  /// `detail` follows the bar, as far as the terminal is wide.
  void at(double fraction, const std::string &detail = {});

private:
  std::string what_;
  double start_, last_ = 0;
  bool terminal_, shown_ = false;
};

} // namespace reshard::command
