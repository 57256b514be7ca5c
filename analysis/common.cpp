#include "analysis/common.h"

#include "support/atomic_file.h"
#include "support/byte_size.h"
#include "support/nearest.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>
#include <stdexcept>
#include <sys/resource.h>
#include <unistd.h>

namespace reshard::analysis {

namespace {

/// Prints an option and its description, wrapped at 100 columns.
void printOption(const std::string &option, std::string_view text) {
  constexpr size_t kColumn = 31, kWidth = 100 - kColumn;
  std::printf("  %-28s ", option.c_str());
  while (text.size() > kWidth) {
    const size_t end = text.rfind(' ', kWidth);
    if (end == std::string_view::npos)
      break;
    std::printf("%.*s\n%*s", static_cast<int>(end), text.data(), static_cast<int>(kColumn), "");
    text.remove_prefix(end + 1);
  }
  std::printf("%.*s\n", static_cast<int>(text.size()), text.data());
}

void help(const Command &command) {
  std::printf("%s %s\n\n%s\n\n", command.name, command.synopsis, command.about);
  for (const Flag &flag : command.flags) {
    const std::string left = std::string(flag.name) + (*flag.value ? std::string("=") + flag.value : "");
    printOption(left, flag.help);
  }
  printOption("--help", "print this text");
  printOption("--version", "print the version");
  std::printf("\nexit codes: 0 success; 1 plans differ, or a check failed; 2 wrong usage or input;\n"
              "3 a failure at run time\n");
}

} // namespace

std::string printable(std::string_view text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]),
               next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    const bool control =
        byte < 0x20 || byte == 0x7f || (byte == 0xc2 && next >= 0x80 && next < 0xa0); // UTF-8 of U+0080 to U+009F
    char escaped[12];
    if (!control)
      result += text[i];
    else if (byte == '\n' || byte == '\r' || byte == '\t')
      result += byte == '\n' ? "\\n" : byte == '\r' ? "\\r" : "\\t";
    else if (byte == 0xc2)
      result.append(escaped, static_cast<size_t>(
                                 std::snprintf(escaped, sizeof escaped, "\\x%02x\\x%02x", byte, text[++i] & 0xff)));
    else
      result.append(escaped, static_cast<size_t>(std::snprintf(escaped, sizeof escaped, "\\x%02x", byte)));
  }
  return result;
}

void printError(const char *command, const std::string &message) {
  std::fprintf(stderr, "%s: error: %s\n", command, printable(message).c_str());
}

std::string explain(const std::exception &exception, const std::string &doing) {
  if (!dynamic_cast<const std::bad_alloc *>(&exception) && !dynamic_cast<const std::length_error *>(&exception))
    return exception.what() + doing;
  return "out of memory" + doing + ": an allocation failed at a peak of " +
         humanBytes(static_cast<double>(peakRssBytes())) + " resident memory";
}

void ignoreFileSizeSignal() { std::signal(SIGXFSZ, SIG_IGN); }

int parseFlags(const Command &command, int argc, char **argv, std::vector<std::string> &arguments) {
  bool flags = true;
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    if (!flags || argument.size() < 2 || argument[0] != '-') {
      arguments.push_back(argument);
      continue;
    }
    if (argument == "--") {
      flags = false;
      continue;
    }
    if (argument == "--help" || argument == "-h") {
      help(command);
      return kDone;
    }
    if (argument == "--version") {
      std::printf("%s %s\n", command.name, RESHARD_VERSION);
      return kDone;
    }
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    const auto flag =
        std::find_if(command.flags.begin(), command.flags.end(), [&](const Flag &f) { return name == f.name; });
    if (flag == command.flags.end()) {
      std::vector<std::string> known = {"--help", "--version"};
      for (const Flag &f : command.flags)
        known.push_back(f.name);
      printError(command.name, "unknown option '" + name + "'" + suggestion(name, known));
      return kUsage;
    }
    std::string value;
    if (*flag->value) {
      if (equals != std::string::npos) {
        value = argument.substr(equals + 1);
      } else if (++i < argc) {
        value = argv[i];
      } else {
        printError(command.name, "option '" + name + "' needs a value: " + name + "=" + flag->value);
        return kUsage;
      }
    } else if (equals != std::string::npos) {
      printError(command.name, "option '" + name + "' takes no value");
      return kUsage;
    }
    if (const std::string error = flag->set(value); !error.empty()) {
      printError(command.name, "option '" + name + "': " + error);
      return kUsage;
    }
  }
  if (arguments.size() != command.arguments) {
    printError(command.name, "found " + std::to_string(arguments.size()) + " positional arguments, expected " +
                                 std::to_string(command.arguments) + ": " + command.name + " " + command.synopsis);
    return kUsage;
  }
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

std::function<std::string(const std::string &)> setNumber(uint64_t &number, uint64_t least, uint64_t most) {
  return [&number, least, most](const std::string &value) -> std::string {
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size() || number < least || number > most)
      return "found '" + value + "', expected a number from " + std::to_string(least) + " to " + std::to_string(most);
    return {};
  };
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
  const auto one =
      std::filesystem::weakly_canonical(std::filesystem::absolute(outputAt(output).path, error), error);
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

uint64_t peakRssBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

ProgressLine::ProgressLine(std::string what)
    : what_(std::move(what)), start_(now()), terminal_(isatty(STDERR_FILENO)) {}

ProgressLine::~ProgressLine() {
  if (shown_)
    std::fprintf(stderr, "\r\033[K");
}

void ProgressLine::at(double fraction) {
  const double time = now();
  if (!terminal_ || time - start_ < 1 || time - last_ < 0.1)
    return;
  last_ = time;
  shown_ = true;
  const int filled = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * 30);
  std::fprintf(stderr, "\r%s [%.*s%*s] %3.0f %%", what_.c_str(), filled, "##############################", 30 - filled,
               "", std::clamp(fraction, 0.0, 1.0) * 100);
}

} // namespace reshard::analysis
