// The Hugging Face config.json that `$key` reads.
#pragma once

#include "compiler/reading.h"

#include "llvm/Support/JSON.h"

namespace reshard {

/// The config of a model: read once, asked by key, "a.b" for nested ones.
class Config {
public:
  /// `config`: the path's node, or null where the model names none. Errors of the file are reported here.
  Config(const Node *config, const std::string &folder, Diagnostics &diagnostics);

  /// An integer or a boolean (0, 1). Nothing where the key is missing or null and has a default; else kUnknownValue
  /// with an error.
  std::optional<int64_t> number(const std::string &key, Location at, bool hasDefault) const;

  /// A text, or the texts of an array. Nothing after an error.
  struct Texts {
    bool array = false;
    std::vector<std::string> items; // one where it is no array
  };
  std::optional<Texts> texts(const std::string &key, Location at) const;

private:
  /// The value of a key, or null: then there was an error, unless `quiet` and the key is missing.
  const llvm::json::Value *find(const std::string &key, Location at, bool quiet) const;

  Diagnostics &diagnostics_;
  std::string name_;
  llvm::json::Value value_ = nullptr;
  bool stated_ = false, read_ = false;
};

} // namespace reshard
