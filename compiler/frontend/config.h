// The Hugging Face config.json that `$key` reads.
#pragma once

#include "compiler/frontend/reading.h"

#include "llvm/Support/JSON.h"

namespace reshard {

/// The config of a model: read once, asked by key, "a.b" for nested ones.
class Config {
public:
  /// `config`: the path's node, or null where the model names none. Errors of the file are reported here.
  Config(const Node *config, const std::string &folder, Diagnostics &diagnostics);

  /// Of the first of some keys that is there and not null: an integer, a boolean (0, 1), or how many items an array
  /// has. Nothing where none is and there is a default; else kUnknownValue with an error.
  std::optional<int64_t> number(const std::vector<std::string> &keys, Location at, bool hasDefault) const;

  /// Likewise a text, or the texts of an array. Nothing after an error.
  struct Texts {
    bool array = false;
    std::vector<std::string> items; // one where it is no array
  };
  std::optional<Texts> texts(const std::vector<std::string> &keys, Location at) const;

private:
  /// The value of the first key that is there and not null, with the key; null after an error, or without one where
  /// there is a default.
  std::pair<const llvm::json::Value *, std::string> find(const std::vector<std::string> &keys, Location at,
                                                         bool hasDefault) const;
  /// The value of one key; null where it is missing: `last` then is what it has of the path, `object` where that would
  /// stand.
  const llvm::json::Value *look(const std::string &key, std::string &last, const llvm::json::Object *&object) const;

  Diagnostics &diagnostics_;
  std::string name_;
  llvm::json::Value value_ = nullptr;
  bool stated_ = false, read_ = false;
};

/// `$a` or `$a or $b`: keys of the config, of which the first that is there counts. What follows a last `or` that no
/// key stands behind begins at `rest`.
struct ConfigKeys {
  std::vector<std::string> names;
  size_t rest = std::string::npos;
};
/// Those of a scalar that begins with `$`. Nothing after an error.
std::optional<ConfigKeys> readKeys(const Node &node, Diagnostics &diagnostics);

} // namespace reshard
