// SPDX-License-Identifier: Apache-2.0
// Numbers and texts of messages as bytes: little-endian, a text with its length before it.
#pragma once

#include "base/hash.h"

#include <cctype>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace reshard {

class ByteWriter {
public:
  template <class Number> ByteWriter &number(Number value) {
    for (size_t i = 0; i < sizeof value; ++i)
      bytes_ += static_cast<char>(value >> (8 * i) & 0xff);
    return *this;
  }
  /// Bytes whose number the reader knows.
  ByteWriter &raw(std::string_view value) {
    bytes_ += value;
    return *this;
  }
  ByteWriter &text(std::string_view value) { return number(static_cast<uint32_t>(value.size())).raw(value); }
  std::string take() { return std::move(bytes_); }

private:
  std::string bytes_;
};

/// After the first read beyond the end, ok() is false and everything reads as 0 or empty.
class ByteReader {
public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}

  template <class Number> Number number() {
    const std::string_view bytes = raw(sizeof(Number));
    Number value = 0;
    for (size_t i = 0; i < bytes.size(); ++i)
      value = static_cast<Number>(value | static_cast<Number>(static_cast<uint8_t>(bytes[i])) << (8 * i));
    return value;
  }
  std::string_view raw(size_t count) {
    ok_ = ok_ && count <= rest_.size();
    const std::string_view bytes = ok_ ? rest_.substr(0, count) : std::string_view();
    rest_.remove_prefix(bytes.size());
    return bytes;
  }
  std::string_view text() { return raw(number<uint32_t>()); }
  std::string_view rest() const { return rest_; }
  bool ok() const { return ok_; }
  bool done() const { return ok_ && rest_.empty(); }

private:
  std::string_view rest_;
  bool ok_ = true;
};

/// Percent-encoding (RFC 3986) of names as parts of keys and as names of files. Letters, digits, '-', '_' and '.' stay;
/// each other byte becomes '%' and two hexadecimal digits.
inline std::string percentEncoded(std::string_view text) {
  std::string encoded;
  for (const char each : text)
    if (std::isalnum(static_cast<unsigned char>(each)) || each == '-' || each == '_' || each == '.')
      encoded += each;
    else
      encoded += "%" + hexadecimal(static_cast<unsigned char>(each), 2);
  return encoded;
}

} // namespace reshard
