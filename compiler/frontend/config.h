// SPDX-License-Identifier: Apache-2.0
// Reads the Hugging Face config.json that `$key` refers to.
#pragma once

#include "compiler/frontend/reading.h"

#include <nlohmann/json_fwd.hpp>

#include <memory>

namespace reshard {

/// The config of a model. Keys of nested objects are written "a.b".
class Config {
public:
  /// `config`: the node of the path, or null if the model has no `config`. Reports errors in the file.
  Config(const Node *config, const std::string &folder, Diagnostics &diagnostics);

  /// The number for the first of `keys` that exists and is not null: an integer, a boolean (0 or 1), or the length of
  /// an array. If no key exists: nullopt if the caller has a default, else kUnknownValue and an error.
  std::optional<int64_t> number(const std::vector<std::string> &keys, Location at, bool hasDefault) const;

  /// A string or an array of strings, found like number(). nullopt after an error.
  struct Texts {
    bool array = false;
    std::vector<std::string> items; // one item if it is not an array
  };
  std::optional<Texts> texts(const std::vector<std::string> &keys, Location at) const;

private:
  /// The value of the first key that exists and is not null, and that key. Null if there is none, which is an error
  /// unless there is a default.
  std::pair<const nlohmann::json *, std::string> find(const std::vector<std::string> &keys, Location at,
                                                      bool hasDefault) const;
  /// The value of one key, or null. If it is missing, `last` is the component of the path that was not found and
  /// `object` is the object that lacks it.
  const nlohmann::json *look(const std::string &key, std::string &last, const nlohmann::json *&object) const;

  Diagnostics &diagnostics_;
  std::string name_;
  std::shared_ptr<const nlohmann::json> value_; // null if there is no config, or after an error in it
  bool stated_ = false;
};

/// `$a` or `$a or $b`: config keys, of which the first that exists applies. `rest` is the offset of the text after the
/// last `or` if that text is not a key (the default).
struct ConfigKeys {
  std::vector<std::string> names;
  size_t rest = std::string::npos;
};
/// Parses a scalar that begins with `$`. nullopt after an error.
std::optional<ConfigKeys> readConfigKeys(const Node &node, Diagnostics &diagnostics);

} // namespace reshard
