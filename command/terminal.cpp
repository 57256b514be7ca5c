// SPDX-License-Identifier: Apache-2.0
#include "command/terminal.h"

#include "command/common.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
#include <utility>

namespace reshard::command {

namespace {

/// The words that begin a message, and their colors: bold red, magenta and cyan.
constexpr std::pair<std::string_view, const char *> kWords[] = {
    {"error:", "\033[1;31m"}, {"warning:", "\033[1;35m"}, {"note:", "\033[1;36m"}};

/// Whether messages on stderr have colors (https://no-color.org).
bool colors() {
  const auto variable = [](const char *name) {
    const char *value = std::getenv(name);
    return std::string_view(value ? value : "");
  };
  return isatty(STDERR_FILENO) && variable("NO_COLOR").empty() && variable("TERM") != "dumb";
}

} // namespace

std::string colored(std::string_view word) {
  for (const auto &[each, color] : kWords)
    if (word == each && colors())
      return color + std::string(word) + "\033[0m";
  return std::string(word);
}

void printNotes(const std::vector<std::string> &notes) {
  for (const std::string &note : notes)
    std::fprintf(stderr, "%s %s\n", colored("note:").c_str(), printable(note).c_str());
}

void printDiagnostics(const std::string &text) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size() - 1) + 1;
    std::string line = text.substr(begin, end - begin);
    size_t first = line.size(); // the first of the words, which begins the line or follows the place
    std::string_view word;
    for (const auto &[each, color] : kWords) {
      const size_t at = line.starts_with(each) ? 0 : line.find(": " + std::string(each));
      if (at < first) {
        first = at == 0 ? 0 : at + 2;
        word = each;
      }
    }
    if (!word.empty())
      line.replace(first, word.size(), colored(word));
    std::fputs(line.c_str(), stderr);
    begin = end;
  }
}

ElapsedLine::ElapsedLine(std::string what) {
  if (isatty(STDERR_FILENO))
    thread_ = std::thread([this, what = std::move(what)] { show(what); });
}

ElapsedLine::~ElapsedLine() {
  if (!thread_.joinable())
    return;
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void ElapsedLine::show(const std::string &what) {
  std::unique_lock lock(mutex_);
  int seconds = 0;
  while (!changed_.wait_for(lock, std::chrono::seconds(1), [this] { return done_; }))
    std::fprintf(stderr, "\r%s: %d s", what.c_str(), ++seconds);
  if (seconds > 0)
    std::fprintf(stderr, "\r\033[K");
}

} // namespace reshard::command
