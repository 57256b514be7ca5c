// SPDX-License-Identifier: Apache-2.0
#include "command/common.h"

#include "base/text.h"
#include "command/terminal.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <malloc.h>
#include <map>
#include <new>
#include <stdexcept>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

namespace reshard::command {

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

std::string counted(uint64_t count, const std::string &what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string patternsOf(const std::set<std::string> &names) {
  constexpr size_t kShown = 8;
  std::map<std::string, uint64_t> patterns;
  for (const std::string &name : names) {
    std::string pattern;
    for (size_t at = 0; at <= name.size();) {
      const size_t end = std::min(name.find('.', at), name.size());
      const std::string_view part = std::string_view(name).substr(at, end - at);
      const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
      pattern.append(at > 0 ? "." : "").append(number ? "*" : part);
      at = end + 1;
    }
    ++patterns[pattern];
  }
  std::string text;
  size_t shown = 0;
  for (const auto &[pattern, count] : patterns) {
    if (shown++ == kShown)
      return text + " and " + counted(patterns.size() - kShown, "pattern") + " more";
    text += (text.empty() ? "" : ", ") + pattern + (count > 1 ? " (" + std::to_string(count) + ")" : "");
  }
  return text;
}

void printError(const char *command, const std::string &message) {
  std::fprintf(stderr, "%s: %s %s\n", command, colored("error:").c_str(), printable(message).c_str());
}

std::string explain(const std::exception &exception, const std::string &doing) {
  if (!dynamic_cast<const std::bad_alloc *>(&exception) && !dynamic_cast<const std::length_error *>(&exception))
    return exception.what() + doing;
  return "out of memory" + doing + ": an allocation failed at a peak of " +
         humanBytes(static_cast<double>(peakRssBytes())) + " resident memory";
}

int runCommand(const char *command, const std::function<int()> &run) {
  try {
    return run();
  } catch (const Failure &failure) {
    printError(command, failure.message);
    return failure.code;
  } catch (const std::exception &exception) {
    printError(command, explain(exception));
    return kFailure;
  }
}

void expectLargeHeap() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MXFAST, 0); // fast bins are consolidated, block by block, by each large free
  // Pages that are not touched use no memory, but count against limits of addresses.
  constexpr size_t kHeapBytes = 128 << 20, kLargePage = 2 << 20;
  const auto endOfHeap = [] { return reinterpret_cast<uintptr_t>(sbrk(0)); };
  const uintptr_t begin = (endOfHeap() + kLargePage - 1) / kLargePage * kLargePage;
  mallopt(M_TOP_PAD, kHeapBytes);
  void *volatile block = std::malloc(kLargePage); // volatile, because the compiler would remove it
  std::free(block);
  mallopt(M_TOP_PAD, 1 << 20);
  if (const uintptr_t end = endOfHeap() / kLargePage * kLargePage; end > begin) // else it did not grow
    madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);       // only a request
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

void ProgressLine::at(double fraction, const std::string &detail) {
  const double time = now();
  if (!terminal_ || time - start_ < 1 || time - last_ < 0.1)
    return;
  last_ = time;
  shown_ = true;
  const int bar = detail.empty() ? 30 : 12;
  const int filled = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * bar);
  char percent[16];
  std::snprintf(percent, sizeof percent, "%3.0f %%", std::clamp(fraction, 0.0, 1.0) * 100);
  const std::string text = what_ + " [" + std::string(filled, '#') + std::string(bar - filled, ' ') + "] " + percent +
                           (detail.empty() ? "" : " " + detail);
  winsize size{};
  const size_t width = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - 1 : 79;
  std::fprintf(stderr, "\r%s\033[K", text.substr(0, width).c_str()); // a longer line would wrap and stay
}

} // namespace reshard::command
