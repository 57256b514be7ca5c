// SPDX-License-Identifier: Apache-2.0
// Shared by all commands: exit codes, option parsing, a progress line. Does not use LLVM, which
// reshard-exec and reshard-diff do not link.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::analysis {

constexpr int kDone = 0;     // done
constexpr int kNegative = 1; // plans differ, or a check failed
constexpr int kUsage = 2;    // wrong usage or input
constexpr int kFailure = 3;  // a failure at run time

/// One flag of a command. `value` names its value in the help; empty for a switch.
struct Flag {
  const char *name; // "--report"
  const char *value;
  const char *help;
  std::function<std::string(const std::string &value)> set; // returns an error text, empty if the value is valid
};

/// One command: its table of flags gives parsing, help and order.
struct Command {
  const char *name;     // "reshard-exec"
  const char *synopsis; // "PLAN --source=DIR --target=DIR"
  const char *about;    // one sentence
  std::vector<Flag> flags;
  size_t arguments; // number of positional arguments
};

/// Every command calls this first. With SIGXFSZ ignored, a file size limit (ulimit -f) makes the write fail instead of
/// killing the process, so partly written files can be removed.
void ignoreFileSizeSignal();

/// Parses `--flag=value`, `--flag value`, switches and positional arguments. --help and --version print their text.
/// Returns -1 if the command should continue, else the exit code; errors are printed.
int parseFlags(const Command &command, int argc, char **argv, std::vector<std::string> &arguments);

/// Setters for Flag::set.
std::function<std::string(const std::string &)> setText(std::string &text);
std::function<std::string(const std::string &)> setSwitch(bool &on);
std::function<std::string(const std::string &)> setNumber(uint64_t &number, uint64_t least, uint64_t most);
std::function<std::string(const std::string &)> setBytes(uint64_t &bytes);
std::function<std::string(const std::string &)> setSeconds(double &seconds);
std::function<std::string(const std::string &)> setChoice(std::string &text, std::vector<std::string> choices);

/// Escapes control characters (for example in names from files) as \n, \r, \t or \xNN, so that the text is safe to
/// print on a terminal.
std::string printable(std::string_view text);

/// Prints "name: error: message" on stderr, the message as printable().
void printError(const char *command, const std::string &message);

/// The error message for an exception that ends a command. `doing`: the activity it interrupted, such as " in pass
/// 'schedule'", or empty.
std::string explain(const std::exception &exception, const std::string &doing = {});

/// Whether the output file of `option` is one of the inputs and would overwrite it; if so, prints an error.
bool refuseOutput(const char *command, const char *option, const std::string &output,
                  const std::vector<std::string> &inputs);

/// Whether two options name the same output file, so that one output would be lost; if so, prints an error. Devices and
/// pipes may be shared.
bool refuseSameOutput(const char *command, const char *option, const std::string &output, const char *other,
                      const std::string &otherOutput);

/// The peak resident memory of this process so far, in bytes.
uint64_t peakRssBytes();

/// The time of a steady clock, in seconds.
double now();

/// A progress bar on stderr. It is shown only on a terminal, and only after one second.
class ProgressLine {
public:
  explicit ProgressLine(std::string what);
  ~ProgressLine();
  void at(double fraction);

private:
  std::string what_;
  double start_, last_ = 0;
  bool terminal_, shown_ = false;
};

} // namespace reshard::analysis
