// SPDX-License-Identifier: Apache-2.0
// Reads pickles without running them. A pickle is a program of a stack machine that names Python functions and calls
// them. This reader keeps each call as data: the name and the arguments. A name outside a table is refused, so it
// accepts exactly what the formats of checkpoints use.
#pragma once

#include "support/status.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace reshard::analysis {

/// The values of a pickle. They refer to each other by number, and may do so in cycles: a walk over them needs a bound.
class Pickle {
public:
  using Value = uint32_t;
  enum class Kind : uint8_t {
    none,
    boolean,
    integer,
    real,
    text,
    bytes,
    tuple,
    list,
    dictionary, // also collections.OrderedDict
    global,     // a class or function; its text is "module name"
    object,     // the result of a call, or an instance of a class
    persistent, // a reference to data outside the pickle
  };
  /// At most so many values, with those of the stack and the memo: about 2 GiB of memory.
  static constexpr size_t kMaxValues = size_t{1} << 25;
  /// A shape, a position or a list of ranks has at most so many members.
  static constexpr size_t kMaxIntegers = size_t{1} << 16;

  /// `allowed`: the globals that may occur, each "module name". `where` begins the errors. `bytes` must outlive the
  /// result. Errors name the position and what was found.
  static Result<Pickle> read(std::string_view bytes, std::span<const std::string_view> allowed,
                             const std::string &where);

  Value root() const { return root_; }
  Kind kind(Value value) const { return nodes_[value].kind; }
  bool is(Value value, Kind kind) const { return nodes_[value].kind == kind; }
  /// Of a boolean or an integer.
  int64_t integer(Value value) const { return nodes_[value].integer; }
  /// Of a text, bytes or a global.
  std::string_view text(Value value) const { return nodes_[value].text; }
  /// Of a tuple or list: its items. Of a dictionary: key, value, key, value. Of an object: its function or class, and
  /// its arguments, a tuple; of an instance with a state also the state. Of a persistent: its reference.
  const std::vector<Value> &items(Value value) const { return nodes_[value].items; }

  /// The value of a text key of a dictionary, the last one if the key is repeated, or nullptr. One thread calls it.
  const Value *find(Value dictionary, std::string_view key) const;
  /// Whether a value is an object of the function or class `global`.
  bool isObject(Value value, std::string_view global) const;
  /// The state of an instance, or nullptr.
  const Value *state(Value object) const;
  size_t size() const { return nodes_.size(); }
  /// The members of a tuple or list of integers, or of a torch.Size; empty optional otherwise, or if there are more
  /// than kMaxIntegers.
  std::optional<std::vector<int64_t>> integers(Value value) const;

private:
  friend class PickleReader;
  struct Node {
    Kind kind = Kind::none;
    int64_t integer = 0;
    std::string_view text;
    std::vector<Value> items;
  };
  std::vector<Node> nodes_;
  Value root_ = 0;
  /// The keys of large dictionaries that find() was called for: many values may share one.
  mutable std::unordered_map<Value, std::unordered_map<std::string_view, const Value *>> keys_;
};

} // namespace reshard::analysis
