// SPDX-License-Identifier: Apache-2.0
// Reads pickles without running them. A pickle is a program of a stack machine that names Python functions and calls
// them. This reader keeps each call as data: the name and the arguments. A name outside a table is refused, so it
// accepts exactly what the formats of checkpoints use.
#pragma once

#include "base/status.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::checkpoints {

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
  using Items = std::span<const Value>;
  /// About the most bytes of values, stack and memo: in all, and for each byte of the pickle, besides a few MiB.
  /// `.metadata` of PyTorch needs about 500 for each chunk of a tensor, and has about 140 bytes for each.
  static constexpr size_t kMaxBytes = size_t{1} << 31, kMaxBytesPerByte = 8, kFewBytes = size_t{8} << 20;
  /// A shape, a position and the coordinates in a mesh have at most so many members, as in PyTorch.
  static constexpr size_t kMaxIntegers = 64;
  /// An instance has at most so many attributes. Many may share one dictionary, which find() searches for each.
  static constexpr size_t kMaxAttributes = 64;

  /// Other globals than those that are allowed. kept: as values of which nothing is known (isOther), unless they are of
  /// torch, or of a module whose functions act: a file with these is none that a trainer has saved.
  enum class Others : uint8_t { refused, kept };

  /// `allowed`: the globals that may occur, each "module name". `where` begins the errors. `bytes` must outlive the
  /// result. Errors name the position and what was found. `most`: bytes of values, stack and memo.
  static Result<Pickle> read(std::string_view bytes, std::span<const std::string_view> allowed,
                             const std::string &where, size_t most = kMaxBytes, Others others = Others::refused);

  Value root() const { return root_; }
  Kind kind(Value value) const { return nodes_[value].kind; }
  bool is(Value value, Kind kind) const { return nodes_[value].kind == kind; }
  /// The number of a boolean or an integer; else 0.
  int64_t integer(Value value) const {
    const Node &node = nodes_[value];
    return node.kind == Kind::boolean || node.kind == Kind::integer ? node.integer : 0;
  }
  /// The characters of a text, bytes or a global; else empty.
  std::string_view text(Value value) const {
    const Node &node = nodes_[value];
    const bool has = node.kind == Kind::text || node.kind == Kind::bytes || node.kind == Kind::global;
    return has ? std::string_view(node.text, node.count) : std::string_view();
  }
  /// A tuple or list has its items; a dictionary has key, value, key, value; an object has its function or class, its
  /// arguments, a tuple, and an instance with a state also the state; a persistent has its reference. Else empty.
  Items items(Value value) const {
    const Node &node = nodes_[value];
    const bool has = node.kind == Kind::tuple || node.kind == Kind::list || node.kind == Kind::dictionary ||
                     node.kind == Kind::object || node.kind == Kind::persistent;
    return has ? Items(items_).subspan(node.first, node.count) : Items();
  }

  /// The value of a text key of a dictionary of at most kMaxAttributes keys, the last one if the key is repeated. Else
  /// nullptr.
  const Value *find(Value dictionary, std::string_view key) const;
  /// Whether a value is an object of the function or class `global`.
  bool isObject(Value value, std::string_view global) const;
  /// Whether a value is a global that is not allowed, or is made by one.
  bool isOther(Value value) const {
    const Value global = is(value, Kind::object) ? items(value)[0] : value;
    return is(global, Kind::global) && others_.contains(text(global));
  }
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
    bool grown = false; // its items have room for the next power of two
    uint32_t count = 0; // how many bytes its text has, or how many items it has
    union {
      uint64_t first = 0; // its first item in items_
      int64_t integer;
      const char *text;
    };
  };
  std::vector<Node> nodes_;
  std::vector<Value> items_; // the items of all nodes
  Value root_ = 0;
  std::set<std::string, std::less<>> others_; // globals that are not allowed
};

} // namespace reshard::checkpoints
