// SPDX-License-Identifier: Apache-2.0
#include "command/option_texts.h"

#include <algorithm>
#include <string_view>

namespace reshard::tools {

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

} // namespace reshard::tools
