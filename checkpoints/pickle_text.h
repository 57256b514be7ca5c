// SPDX-License-Identifier: Apache-2.0
// Writes pickles: the opcodes of protocol 2 that checkpoints need.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::checkpoints {

/// A pickle under construction. Each call appends opcodes; a value is complete before the next one begins.
class PickleText {
public:
  PickleText() : text_("\x80\x02") {}

  void none() { text_ += 'N'; }
  void boolean(bool value) { text_ += value ? '\x88' : '\x89'; }
  void integer(int64_t value) {
    text_ += "\x8a\x08"; // LONG1 of 8 bytes
    for (int byte = 0; byte < 8; ++byte)
      text_ += static_cast<char>(static_cast<uint64_t>(value) >> (8 * byte));
  }
  void text(std::string_view value) {
    text_ += 'X';
    for (int byte = 0; byte < 4; ++byte)
      text_ += static_cast<char>(value.size() >> (8 * byte));
    text_ += value;
  }
  void global(std::string_view module, std::string_view name) {
    text_ += 'c';
    (text_ += module) += '\n';
    (text_ += name) += '\n';
  }
  void mark() { text_ += '('; }
  void tuple() { text_ += 't'; } // joins the values since mark()
  void emptyTuple() { text_ += ')'; }
  void emptyDictionary() { text_ += '}'; }
  void setItems() { text_ += 'u'; } // the keys and values since mark(), into the dictionary before it
  void emptyList() { text_ += ']'; }
  void append() { text_ += 'a'; }     // a value to the list before it
  void call() { text_ += 'R'; }       // the function before the last tuple, with that tuple
  void build() { text_ += 'b'; }      // sets the last value as the state of the object before it
  void persistent() { text_ += 'Q'; } // turns the last value into a reference outside the pickle

  void integers(const std::vector<int64_t> &values) {
    mark();
    for (const int64_t value : values)
      integer(value);
    tuple();
  }
  /// An object of a class, made without arguments.
  void object(std::string_view module, std::string_view name) {
    global(module, name);
    emptyTuple();
    text_ += '\x81';
  }

  /// The pickle with its last opcode.
  std::string finish() { return std::move(text_ += '.'); }

private:
  std::string text_;
};

} // namespace reshard::checkpoints
