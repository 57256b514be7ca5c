// SPDX-License-Identifier: Apache-2.0
// Command lines: a table of flags for each command, parsed by CLI11.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reshard::command {

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
  size_t arguments;    // number of positional arguments
  size_t optional = 0; // how many more are allowed
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
std::function<std::string(const std::string &)> setBytes(uint64_t &bytes);
std::function<std::string(const std::string &)> setSeconds(double &seconds);
std::function<std::string(const std::string &)> setChoice(std::string &text, std::vector<std::string> choices);

/// Reads a number from `least` to `most`. Returns an error text, empty if there is no error.
std::string parseNumber(const std::string &value, uint64_t least, uint64_t most, uint64_t &number);

/// Sets a number, or an optional one, of a type that has all numbers from `least` to `most`.
template <class Number>
std::function<std::string(const std::string &)> setNumber(Number &number, uint64_t least, uint64_t most) {
  return [&number, least, most](const std::string &value) {
    uint64_t found = 0;
    std::string error = parseNumber(value, least, most, found);
    number = static_cast<Number>(found);
    return error;
  };
}

/// Whether the output file of `option` is one of the inputs and would overwrite it; if so, prints an error.
bool refuseOutput(const char *command, const char *option, const std::string &output,
                  const std::vector<std::string> &inputs);

/// Whether two options name the same output file, so that one output would be lost; if so, prints an error. Devices and
/// pipes may be shared.
bool refuseSameOutput(const char *command, const char *option, const std::string &output, const char *other,
                      const std::string &otherOutput);

/// What --help prints.
std::string helpOf(const Command &command);

/// A manual page for man: `reshard-exec --manual >reshard-exec.1`.
std::string manualOf(const Command &command);

/// The shells whose completions --completion prints.
constexpr const char *kShells[] = {"bash", "zsh", "fish"};

/// The completion script of a shell: names of flags, and files for their values and for arguments.
std::string completionOf(const Command &command, const std::string &shell);

} // namespace reshard::command
