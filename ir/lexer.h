// SPDX-License-Identifier: Apache-2.0
// The tokens of the textual IR: words, numbers, strings, lists. Used by layout_parser.h and parse.cpp.
#pragma once

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::ir {

/// The first syntax error.
struct ParseError {
  size_t offset; // bytes from the start of the text
  std::string message;
};

/// Consumes tokens from the front of a text; throws ParseError if the next token is not the expected one. It does not
/// recurse, and its memory is proportional to the text.
class Lexer {
public:
  explicit Lexer(std::string_view text) : text_(text) {}

  [[noreturn]] void fail(size_t at, const std::string &message) { throw ParseError{at, message}; }

  void skip() {
    while (at_ < text_.size()) {
      if (std::isspace(static_cast<unsigned char>(text_[at_])))
        ++at_;
      else if (text_.substr(at_, 2) == "//")
        at_ = std::min(text_.find('\n', at_), text_.size());
      else
        break;
    }
  }
  size_t position() {
    skip();
    return at_;
  }
  static bool isWordCharacter(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-'; }

  /// The next token, not consumed: a word or one character.
  std::string_view peek() {
    skip();
    if (at_ >= text_.size())
      return "the end";
    size_t end = at_;
    while (end < text_.size() && isWordCharacter(text_[end]))
      ++end;
    return text_.substr(at_, std::max<size_t>(end - at_, 1));
  }
  bool is(std::string_view token) {
    skip();
    if (text_.substr(at_, token.size()) != token)
      return false;
    return !isWordCharacter(token.back()) || at_ + token.size() >= text_.size() ||
           !isWordCharacter(text_[at_ + token.size()]);
  }
  bool take(std::string_view token) {
    if (!is(token))
      return false;
    at_ += token.size();
    return true;
  }
  void expect(std::string_view token) {
    if (!take(token))
      fail(position(), "expected '" + std::string(token) + "', found '" + std::string(peek()) + "'");
  }
  std::string word() {
    skip();
    const std::string_view token = peek();
    if (at_ >= text_.size() || !isWordCharacter(token[0]))
      fail(at_, "expected a word, found '" + std::string(token) + "'");
    at_ += token.size();
    return std::string(token);
  }
  int64_t number() {
    skip();
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (error != std::errc())
      fail(at_, "expected a number" + std::string(error == std::errc::result_out_of_range ? " below 2^63" : "") +
                    ", found '" + std::string(peek()) + "'");
    at_ = static_cast<size_t>(end - text_.data());
    return value;
  }
  int64_t after(std::string_view token) {
    expect(token);
    return number();
  }
  /// An index of one of `count` items; `what` names the item in the error.
  template <class Integer> void reference(Integer &value, size_t count, const char *what) {
    const size_t at = position();
    const int64_t n = number();
    if (n < 0 || static_cast<uint64_t>(n) >= count)
      fail(at, "expected the number of one of " + std::to_string(count) + " items of kind '" + what + "', found " +
                   std::to_string(n));
    value = static_cast<Integer>(n);
  }
  template <class Integer> void bounded(Integer &value) {
    const size_t at = position();
    const int64_t n = number();
    if (static_cast<int64_t>(static_cast<Integer>(n)) != n)
      fail(at, "expected a number from " + std::to_string(std::numeric_limits<Integer>::min()) + " to " +
                   std::to_string(std::numeric_limits<Integer>::max()) + ", found " + std::to_string(n));
    value = static_cast<Integer>(n);
  }
  std::string string() {
    expect("\"");
    std::string result;
    while (at_ < text_.size() && text_[at_] != '"') {
      char c = text_[at_++];
      if (c == '\\' && at_ < text_.size()) {
        c = text_[at_++];
        if (c == 'x' && at_ + 2 <= text_.size()) {
          unsigned value = 0;
          if (std::from_chars(text_.data() + at_, text_.data() + at_ + 2, value, 16).ptr != text_.data() + at_ + 2)
            fail(at_, "expected two hexadecimal digits after '\\x', found '" + std::string(text_.substr(at_, 2)) + "'");
          c = static_cast<char>(value);
          at_ += 2;
        }
      }
      result += c;
    }
    if (at_ >= text_.size())
      fail(at_, "expected '\"' at the end of the string, found the end of the text");
    ++at_;
    return result;
  }
  template <class Integer> std::vector<Integer> list() {
    std::vector<Integer> numbers;
    expect("[");
    while (!take("]")) {
      if (!numbers.empty())
        expect(",");
      bounded(numbers.emplace_back());
    }
    return numbers;
  }
  /// A list in which a:b means a, a+1 … b-1. Only here is the result larger than the text, so the sum of all ranges is
  /// limited.
  std::vector<int32_t> ranges() {
    constexpr int64_t kMaxTotal = int64_t{1} << 26;
    std::vector<int32_t> numbers;
    expect("[");
    while (!take("]")) {
      if (!numbers.empty())
        expect(",");
      const size_t at = position();
      int32_t first = 0;
      bounded(first);
      const int64_t last = take(":") ? number() : int64_t{first} + 1;
      if (last <= first || last - first > kMaxTotal - ranged_ || last > INT32_MAX)
        fail(at, "expected an ascending range below 2^31, all ranges of the text together at most " +
                     std::to_string(kMaxTotal) + " numbers, found " + std::to_string(first) + ":" +
                     std::to_string(last));
      ranged_ += last - first;
      for (int64_t n = first; n < last; ++n)
        numbers.push_back(static_cast<int32_t>(n));
    }
    return numbers;
  }

protected:
  std::string_view text_;
  size_t at_ = 0;

private:
  int64_t ranged_ = 0; // numbers in all ranges so far
};

} // namespace reshard::ir
