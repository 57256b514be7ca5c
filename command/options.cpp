// SPDX-License-Identifier: Apache-2.0
// Registers the flags of a command with CLI11, and replaces its messages by ours: which option, what was found, the
// nearest known name.
#include "command/options.h"

#include "base/atomic_file.h"
#include "base/text.h"
#include "command/common.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string_view>

namespace reshard::command {

namespace {

const Flag *flagNamed(const Command &command, std::string_view name) {
  const auto flag =
      std::find_if(command.flags.begin(), command.flags.end(), [&](const Flag &each) { return name == each.name; });
  return flag == command.flags.end() ? nullptr : &*flag;
}

/// The first flag that is given as `--flag=`, or null. CLI11 would use the next argument as its value.
const Flag *emptyFlag(const Command &command, int argc, char **argv) {
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    std::string_view name = argv[i];
    if (!name.ends_with('='))
      continue;
    name.remove_suffix(1);
    if (const Flag *flag = flagNamed(command, name); flag && *flag->value)
      return flag;
  }
  return nullptr;
}

/// Adds a flag that may be repeated: each value is set, in their order.
void addFlag(CLI::App &app, const Flag &flag) {
  const bool isSwitch = !*flag.value, isShort = flag.name[1] != '-';
  app.add_option(flag.name,
                 [&flag, isSwitch, isShort](const CLI::results_t &values) {
                   const std::string option = "option '" + std::string(flag.name) + "'";
                   for (std::string value : values) {
                     if (isSwitch && value != "true") // CLI11's value of `--flag`
                       throw CLI::ValidationError(option + " takes no value");
                     if (isShort && value.starts_with('=')) // `-o=FILE`
                       value.erase(0, 1);
                     if (const std::string error = flag.set(value); !error.empty())
                       throw CLI::ValidationError(option + ": " + error);
                   }
                   return true;
                 })
      ->expected(isSwitch ? 0 : 1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

} // namespace

void ignoreFileSizeSignal() { std::signal(SIGXFSZ, SIG_IGN); }

int parseFlags(const Command &command, int argc, char **argv, std::vector<std::string> &arguments) {
  auto refuse = [&](const std::string &message) {
    printError(command.name, message);
    return kUsage;
  };
  if (const Flag *flag = emptyFlag(command, argc, argv))
    return refuse("option '" + std::string(flag->name) + "': the value is empty");
  CLI::App app;
  app.set_help_flag("-h,--help");
  app.set_version_flag("--version", RESHARD_VERSION);
  bool manual = false;
  std::string shell;
  app.add_flag("--manual", manual);
  app.add_option("--completion", shell)
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kShells), std::end(kShells))));
  app.allow_extras(); // positional arguments, and unknown options
  for (const Flag &flag : command.flags)
    addFlag(app, flag);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp &) {
    std::printf("%s", helpOf(command).c_str());
    return kDone;
  } catch (const CLI::CallForVersion &) {
    std::printf("%s %s\n", command.name, RESHARD_VERSION);
    return kDone;
  } catch (const CLI::ArgumentMismatch &error) { // the last argument is an option without its value
    const std::string name = argv[argc - 1];
    const Flag *flag = flagNamed(command, name);
    return refuse(flag ? "option '" + name + "' needs a value: " + name + "=" + flag->value : error.what());
  } catch (const CLI::ParseError &error) {
    return refuse(error.what());
  }
  if (manual || !shell.empty()) {
    std::printf("%s", (manual ? manualOf(command) : completionOf(command, shell)).c_str());
    return kDone;
  }
  bool flags = true;
  for (const std::string &argument : app.remaining()) {
    if (!flags || argument.size() < 2 || argument[0] != '-') {
      arguments.push_back(argument);
    } else if (argument == "--") {
      flags = false;
    } else {
      std::vector<std::string> known = {"--help", "--version"};
      for (const Flag &flag : command.flags)
        known.push_back(flag.name);
      const std::string name = argument.substr(0, argument.find('='));
      return refuse("unknown option '" + name + "'" + suggestion(name, known));
    }
  }
  if (arguments.size() < command.arguments || arguments.size() > command.arguments + command.optional)
    return refuse(
        "found " + std::to_string(arguments.size()) + " positional arguments, expected " +
        std::to_string(command.arguments) +
        (command.optional > 0 ? " to " + std::to_string(command.arguments + command.optional) : std::string()) + ": " +
        command.name + " " + command.synopsis);
  return -1;
}

std::function<std::string(const std::string &)> setText(std::string &text) {
  return [&text](const std::string &value) {
    text = value;
    return value.empty() ? std::string("the value is empty") : std::string();
  };
}

std::function<std::string(const std::string &)> setSwitch(bool &on) {
  return [&on](const std::string &) {
    on = true;
    return std::string();
  };
}

std::string parseNumber(const std::string &value, uint64_t least, uint64_t most, uint64_t &number) {
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < least || number > most)
    return "found '" + value + "', expected a number from " + std::to_string(least) + " to " + std::to_string(most);
  return {};
}

std::function<std::string(const std::string &)> setBytes(uint64_t &bytes) {
  return [&bytes](const std::string &value) -> std::string {
    const Result<int64_t> size = parseBytes(value);
    if (!size.ok())
      return "found '" + value + "', expected " + size.status().message();
    bytes = static_cast<uint64_t>(*size);
    return {};
  };
}

std::function<std::string(const std::string &)> setSeconds(double &seconds) {
  return [&seconds](const std::string &value) -> std::string {
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), seconds);
    if (error != std::errc() || end != value.data() + value.size() || !(seconds > 0) || seconds > 1e9)
      return "found '" + value + "', expected a number of seconds above 0";
    return {};
  };
}

std::function<std::string(const std::string &)> setChoice(std::string &text, std::vector<std::string> choices) {
  return [&text, choices = std::move(choices)](const std::string &value) -> std::string {
    text = value;
    if (std::find(choices.begin(), choices.end(), value) != choices.end())
      return {};
    std::string list;
    for (const std::string &choice : choices)
      list += (list.empty() ? "" : ", ") + choice;
    return "found '" + value + "', expected one of " + list;
  };
}

bool refuseOutput(const char *command, const char *option, const std::string &output,
                  const std::vector<std::string> &inputs) {
  for (const std::string &input : inputs)
    if (!output.empty() && sameFile(output, input)) {
      printError(command, "option '" + std::string(option) + "': '" + output + "' would overwrite the input '" + input +
                              "', expected another file");
      return true;
    }
  return false;
}

bool refuseSameOutput(const char *command, const char *option, const std::string &output, const char *other,
                      const std::string &otherOutput) {
  if (output.empty() || otherOutput.empty() || outputAt(output).direct || outputAt(otherOutput).direct)
    return false;
  std::error_code error;
  const auto one = std::filesystem::weakly_canonical(std::filesystem::absolute(outputAt(output).path, error), error);
  if (error) // the write reports the cause
    return false;
  const auto two =
      std::filesystem::weakly_canonical(std::filesystem::absolute(outputAt(otherOutput).path, error), error);
  if (error || one != two)
    return false;
  printError(command, "options '" + std::string(other) + "' and '" + option + "' both write '" + output +
                          "', expected two files");
  return true;
}

namespace {

constexpr const char *kExitCodes =
    "0 success; 1 plans differ, or a check failed; 2 wrong usage or input; 3 a failure at run time";

/// The flags that every command has.
const std::vector<Flag> &commonFlags() {
  static const std::vector<Flag> flags = {
      {"--help", "", "print this text", {}},
      {"--version", "", "print the version", {}},
      {"--manual", "", "print the manual page", {}},
      {"--completion", "SHELL", "print the completion script for bash, zsh or fish", {}},
  };
  return flags;
}

std::vector<Flag> allFlags(const Command &command) {
  std::vector<Flag> flags = command.flags;
  flags.insert(flags.end(), commonFlags().begin(), commonFlags().end());
  return flags;
}

/// An option and its description, wrapped at 100 columns.
std::string row(const std::string &option, std::string_view text) {
  constexpr size_t kColumn = 31, kWidth = 100 - kColumn;
  std::string result = "  " + option;
  result.resize(std::max(result.size() + 1, kColumn), ' ');
  while (text.size() > kWidth) {
    const size_t end = text.rfind(' ', kWidth);
    if (end == std::string_view::npos)
      break;
    result += std::string(text.substr(0, end)) + "\n" + std::string(kColumn, ' ');
    text.remove_prefix(end + 1);
  }
  return result + std::string(text) + "\n";
}

std::string named(const Flag &flag) {
  return std::string(flag.name) + (*flag.value ? std::string("=") + flag.value : "");
}

/// Text of troff: backslashes and minus signs are escaped, and no line begins with a control character.
std::string troff(const std::string &text) {
  std::string result;
  for (const char c : text)
    result += c == '\\' ? std::string("\\e") : c == '-' ? "\\-" : std::string(1, c);
  return result.starts_with('.') || result.starts_with('\'') ? "\\&" + result : result;
}

/// Text between single quotes of a shell.
std::string quoted(const std::string &text) {
  std::string result;
  for (const char c : text)
    result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return "'" + result + "'";
}

std::string bash(const Command &command) {
  std::string names;
  for (const Flag &flag : allFlags(command))
    names += (names.empty() ? "" : " ") + std::string(flag.name) + (*flag.value && flag.name[1] == '-' ? "=" : "");
  const std::string function = "_" + std::string(command.name).replace(7, 1, "_");
  return function +
         "() {\n"
         "  local word=$2\n"
         "  if [[ $word == -* ]]; then\n"
         "    COMPREPLY=($(compgen -W \"" +
         names +
         "\" -- \"$word\"))\n"
         "    [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace\n"
         "  else\n"
         "    mapfile -t COMPREPLY < <(compgen -f -- \"$word\")\n"
         "    compopt -o filenames\n"
         "  fi\n"
         "}\n"
         "complete -F " +
         function + " " + command.name + "\n";
}

std::string zsh(const Command &command) {
  std::string text = "#compdef " + std::string(command.name) + "\n_arguments";
  for (const Flag &flag : allFlags(command)) {
    std::string help;
    for (const char c : std::string_view(flag.help))
      help += c == '[' || c == ']' || c == ':' ? std::string("\\") + c : std::string(1, c);
    const std::string end = !*flag.value ? "" : flag.name[1] == '-' ? "=" : "";
    text += " \\\n  " + quoted("*" + std::string(flag.name) + end + "[" + help + "]" +
                               (*flag.value ? ":" + std::string(flag.value) + ":_files" : ""));
  }
  return text + " \\\n  '*:file:_files'\n";
}

std::string fish(const Command &command) {
  std::string text;
  for (const Flag &flag : allFlags(command)) {
    const bool isShort = flag.name[1] != '-';
    text += "complete -c " + std::string(command.name) + (isShort ? " -s " : " -l ") + (flag.name + (isShort ? 1 : 2)) +
            (*flag.value ? " -r" : "") + " -d " + quoted(flag.help) + "\n";
  }
  return text;
}

} // namespace

std::string helpOf(const Command &command) {
  std::string text = std::string(command.name) + " " + command.synopsis + "\n\n" + command.about + "\n\n";
  for (const Flag &flag : allFlags(command))
    text += row(named(flag), flag.help);
  return text + "\nexit codes: " + kExitCodes + "\n";
}

std::string manualOf(const Command &command) {
  std::string text = ".TH " + std::string(command.name) + " 1 \"\" \"reshard " RESHARD_VERSION "\"\n.SH NAME\n" +
                     troff(command.name) + " \\- " +
                     troff(std::string(command.about).substr(0, std::string(command.about).find(". "))) +
                     "\n.SH SYNOPSIS\n.B " + troff(command.name) + "\n" + troff(command.synopsis) +
                     "\n.SH DESCRIPTION\n" + troff(command.about) + "\n.SH OPTIONS\n";
  for (const Flag &flag : allFlags(command))
    text += ".TP\n.B " + troff(named(flag)) + "\n" + troff(flag.help) + "\n";
  return text + ".SH EXIT STATUS\n" + troff(kExitCodes) + "\n";
}

std::string completionOf(const Command &command, const std::string &shell) {
  return shell == "bash" ? bash(command) : shell == "zsh" ? zsh(command) : fish(command);
}

} // namespace reshard::command
