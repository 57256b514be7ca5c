#include "compiler/config.h"

#include <algorithm>
#include <cstdio>

namespace reshard {

namespace {

/// llvm::json reads nested values by recursion without a limit of its own.
bool checkNesting(uint32_t file, Diagnostics &diagnostics) {
  constexpr int kMaxDepth = 64;
  const std::string &text = diagnostics.text(file);
  Location at{file, 1, 0};
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    ++at.column;
    if (c == '\n') {
      ++at.line;
      at.column = 0;
    } else if (quoted && c == '\\' && i + 1 < text.size() && text[i + 1] != '\n') {
      ++i;
      ++at.column;
    } else if (c == '"') {
      quoted = !quoted;
    } else if (!quoted && (c == '[' || c == '{') && ++depth > kMaxDepth) {
      diagnostics.error(at, "arrays and objects nested more than " + std::to_string(kMaxDepth) + " deep");
      return false;
    } else if (!quoted && (c == ']' || c == '}')) {
      --depth;
    }
  }
  return true;
}

const char *kind(const llvm::json::Value &value) {
  switch (value.kind()) {
  case llvm::json::Value::Null:
    return "null";
  case llvm::json::Value::Number:
    return "a number with a fraction or past 2^63";
  case llvm::json::Value::String:
    return "a string";
  case llvm::json::Value::Array:
    return "an array";
  default:
    return "an object";
  }
}

} // namespace

Config::Config(const Node *config, const std::string &folder, Diagnostics &diagnostics) : diagnostics_(diagnostics) {
  if (!config)
    return;
  stated_ = true;
  const auto path = readText(*config, "'config'", diagnostics);
  const auto file = path ? readFile(joinPath(folder, *path), config->at, diagnostics) : std::nullopt;
  if (!file || !checkNesting(*file, diagnostics))
    return;
  name_ = *path;
  auto parsed = llvm::json::parse(diagnostics.text(*file));
  if (!parsed) {
    const std::string error = llvm::toString(parsed.takeError()); // "[line:column, byte=n]: Message"
    unsigned line = 1, column = 0;
    const size_t end = error.find("]: ");
    std::string message = error;
    if (end != std::string::npos && std::sscanf(error.c_str(), "[%u:%u", &line, &column) == 2)
      message = error.substr(end + 3);
    diagnostics.error({*file, line, column + 1}, "not JSON: " + message);
    return;
  }
  if (!parsed->getAsObject()) {
    diagnostics.error({*file, 1, 1}, "expected a JSON object for a config");
    return;
  }
  value_ = std::move(*parsed);
  read_ = true;
}

const llvm::json::Value *Config::find(const std::string &key, Location at, bool quiet) const {
  if (!read_) {
    if (!stated_)
      diagnostics_.error(at, "'$" + key + "' without a config, expected 'config: FILE' in the model");
    return nullptr;
  }
  const llvm::json::Value *value = &value_;
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = key.find('.', begin);
    const std::string part = key.substr(begin, end - begin);
    const llvm::json::Object *object = value->getAsObject();
    value = object ? object->get(part) : nullptr;
    if (value)
      continue;
    if (quiet)
      return nullptr;
    std::vector<std::string> known;
    if (object)
      for (const auto &[name, each] : *object)
        known.push_back(name.str());
    std::sort(known.begin(), known.end());
    diagnostics_.error(at, "'" + name_ + "' has no key '" + key + "'" + suggestion(part, known));
    return nullptr;
  }
  return value;
}

std::optional<int64_t> Config::number(const std::string &key, Location at, bool hasDefault) const {
  const llvm::json::Value *value = find(key, at, hasDefault);
  if (!value || (hasDefault && value->kind() == llvm::json::Value::Null))
    return hasDefault && read_ ? std::nullopt : std::optional(kUnknownValue);
  if (const auto truth = value->getAsBoolean())
    return *truth;
  if (const auto number = value->getAsInteger(); number && *number != kUnknownValue)
    return *number;
  diagnostics_.error(at,
                     "key '" + key + "' of '" + name_ + "' is " + kind(*value) + ", expected an integer or a boolean");
  return kUnknownValue;
}

std::optional<Config::Texts> Config::texts(const std::string &key, Location at) const {
  const llvm::json::Value *value = find(key, at, false);
  if (!value)
    return std::nullopt;
  if (const auto text = value->getAsString())
    return Texts{false, {text->str()}};
  Texts result{true, {}};
  const llvm::json::Array *array = value->getAsArray();
  bool ok = array != nullptr;
  for (size_t i = 0; ok && i < array->size(); ++i) {
    const auto text = (*array)[i].getAsString();
    ok = text.has_value();
    if (ok)
      result.items.push_back(text->str());
  }
  if (ok)
    return result;
  diagnostics_.error(at, "key '" + key + "' of '" + name_ + "' is " +
                             (array ? "an array of other things than texts" : kind(*value)) +
                             ", expected a text or an array of texts");
  return std::nullopt;
}

} // namespace reshard
