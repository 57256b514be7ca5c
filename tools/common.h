// What all commands share: exit codes, flags, sizes for people, a progress line. No LLVM here: the executor's commands
// stay lean.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::tools {

constexpr int kDone = 0;     // done
constexpr int kNegative = 1; // a negative answer: plans differ, a check failed
constexpr int kUsage = 2;    // wrong usage or input
constexpr int kFailure = 3;  // a failure at run time

/// One flag of a command. `value` names its value in the help; empty: a switch.
struct Flag {
  const char *name; // "--report"
  const char *value;
  const char *help;
  std::function<std::string(const std::string &value)> set; // an error text, empty where the value is good
};

/// One command: its table of flags gives parsing, help and order.
struct Command {
  const char *name;     // "reshard-exec"
  const char *synopsis; // "PLAN --source=DIR --target=DIR"
  const char *about;    // one sentence
  std::vector<Flag> flags;
  size_t arguments; // how many positional ones
};

/// What every command does first. A limit on the size of files (ulimit -f) is an error of the write then, not a signal
/// that ends the process and leaves what is half written.
void ignoreFileSizeSignal();

/// Parses `--flag=value`, `--flag value`, switches and positional arguments. --help and --version print and end.
/// Returns -1 to go on, else the exit code; messages are printed.
int parseFlags(const Command &command, int argc, char **argv, std::vector<std::string> &arguments);

/// Setters for Flag::set.
std::function<std::string(const std::string &)> setText(std::string &text);
std::function<std::string(const std::string &)> setSwitch(bool &on);
std::function<std::string(const std::string &)> setNumber(uint64_t &number, uint64_t least, uint64_t most);
std::function<std::string(const std::string &)> setBytes(uint64_t &bytes);
std::function<std::string(const std::string &)> setSeconds(double &seconds);
std::function<std::string(const std::string &)> setChoice(std::string &text, std::vector<std::string> choices);

/// Text as it can be printed on a terminal: control characters (of names in files, say) as \n, \r, \t or \xNN.
std::string printable(std::string_view text);

/// Prints "name: error: message" on stderr, the message as printable().
void printError(const char *command, const std::string &message);

/// What to say of an exception that ends a command. `doing`: what it was at, " in pass 'schedule'", or nothing.
std::string explain(const std::exception &exception, const std::string &doing = {});

/// "1.1 GiB", "512 B".
std::string humanBytes(double bytes);

/// The nearest of some names, as ", did you mean 'x'?", or nothing.
std::string nearest(const std::string &name, const std::vector<std::string> &known);

/// Writes a file whole or not at all; one behind a symbolic link stands where it stood. What is no regular file (a
/// device, a FIFO, /dev/stdout) is written to. An error text, empty on success.
std::string writeFile(const std::string &path, const std::string &text);

/// Whether the output that an option names is one of the inputs, which it would replace; a message says so.
bool refuseOutput(const char *command, const char *option, const std::string &output,
                  const std::vector<std::string> &inputs);

/// Whether two options name one file as their output (one of them would be lost); a message says so. Devices and pipes
/// may be shared.
bool refuseSameOutput(const char *command, const char *option, const std::string &output, const char *other,
                      const std::string &otherOutput);

/// The most bytes of this process that were resident at once, so far.
uint64_t peakRssBytes();

/// Seconds on a steady clock.
double now();

/// A line on stderr that grows, on a terminal, for what takes more than a second.
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

} // namespace reshard::tools
