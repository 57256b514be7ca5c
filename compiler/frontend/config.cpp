#include "compiler/frontend/config.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <map>

namespace reshard {

namespace {

/// Limits the nesting, because llvm::json parses nested values recursively without a limit.
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

/// Reports duplicate keys, of which llvm::json silently keeps one. The text is valid JSON, so a string is a key if it
/// is in an object and follows `{` or `,`.
void checkKeys(uint32_t file, Diagnostics &diagnostics) {
  const std::string &text = diagnostics.text(file);
  std::vector<std::optional<std::map<std::string, Location>>> open; // keys of each open object; nullopt for an array
  Location at{file, 1, 0};
  bool key = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    ++at.column;
    if (c == '\n') {
      ++at.line;
      at.column = 0;
    } else if (c == '{' || c == '[') {
      open.emplace_back();
      key = c == '{';
      if (key)
        open.back().emplace();
    } else if (c == '}' || c == ']') {
      open.pop_back();
    } else if (c == ',') {
      key = open.back().has_value();
    } else if (c == '"') {
      size_t end = i + 1;
      while (text[end] != '"')
        end += text[end] == '\\' ? 2 : 1;
      if (key) {
        const std::string name =
            llvm::cantFail(llvm::json::parse(text.substr(i, end + 1 - i))).getAsString()->str(); // resolves escapes
        const auto [known, added] = open.back()->emplace(name, at);
        if (!added) {
          diagnostics.error(at, "duplicate key '" + name + "'");
          diagnostics.note(known->second, "first defined here");
        }
        key = false;
      }
      at.column += static_cast<uint32_t>(end - i);
      i = end;
    }
  }
}

/// The type of a value that is not an integer or a boolean, in error messages.
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
  checkKeys(*file, diagnostics);
  value_ = std::move(*parsed);
  read_ = true;
}

const llvm::json::Value *Config::look(const std::string &key, std::string &last,
                                      const llvm::json::Object *&object) const {
  const llvm::json::Value *value = &value_;
  for (size_t begin = 0, end = 0; value && end != std::string::npos; begin = end + 1) {
    end = key.find('.', begin);
    last = key.substr(begin, end - begin);
    object = value->getAsObject();
    value = object ? object->get(last) : nullptr;
  }
  return value;
}

std::pair<const llvm::json::Value *, std::string> Config::find(const std::vector<std::string> &keys, Location at,
                                                               bool hasDefault) const {
  if (!read_) {
    if (!stated_)
      diagnostics_.error(at, "'$" + keys[0] +
                                 "' reads the config, but the model has no 'config'; add 'config: FILE' to the model");
    return {};
  }
  std::pair<const llvm::json::Value *, std::string> null;
  std::string names, last;
  const llvm::json::Object *object = nullptr;
  for (const std::string &key : keys) {
    if (const llvm::json::Value *value = look(key, last, object)) {
      if (value->kind() != llvm::json::Value::Null)
        return {value, key};
      null = {value, key};
    }
    names += (names.empty() ? "'" : " and no '") + key + "'";
  }
  if (hasDefault || null.first)
    return hasDefault ? std::pair<const llvm::json::Value *, std::string>() : null;
  std::vector<std::string> known;
  if (object && keys.size() == 1)
    for (const auto &[name, each] : *object)
      known.push_back(name.str());
  std::sort(known.begin(), known.end());
  diagnostics_.error(at, "'" + name_ + "' has no key " + names + suggestion(last, known));
  return {};
}

std::optional<int64_t> Config::number(const std::vector<std::string> &keys, Location at, bool hasDefault) const {
  const auto [value, key] = find(keys, at, hasDefault);
  if (!value)
    return hasDefault && read_ ? std::nullopt : std::optional(kUnknownValue);
  if (const auto truth = value->getAsBoolean())
    return *truth;
  if (const auto number = value->getAsInteger(); number && *number != kUnknownValue)
    return *number;
  if (const auto *array = value->getAsArray())
    return static_cast<int64_t>(array->size());
  diagnostics_.error(at, "key '" + key + "' of '" + name_ + "' is " + kind(*value) +
                             ", expected an integer, a boolean or an array");
  return kUnknownValue;
}

std::optional<Config::Texts> Config::texts(const std::vector<std::string> &keys, Location at) const {
  const auto [value, key] = find(keys, at, false);
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
                             (array ? "an array with items that are not strings" : kind(*value)) +
                             ", expected a string or an array of strings");
  return std::nullopt;
}

std::optional<ConfigKeys> readConfigKeys(const Node &node, Diagnostics &diagnostics) {
  constexpr std::string_view kOr = "or ";
  const std::string &text = node.text;
  auto inKey = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '-'; };
  ConfigKeys keys;
  size_t at = 0;
  while (at < text.size() && text[at] == '$') {
    size_t end = at + 1;
    while (end < text.size() && inKey(text[end]))
      ++end;
    if (end == at + 1) {
      diagnostics.error(locationIn(node, at), "expected a config key after '$'");
      return std::nullopt;
    }
    keys.names.push_back(text.substr(at + 1, end - at - 1));
    const size_t next = text.find_first_not_of(' ', end);
    if (next == std::string::npos)
      return keys;
    if (next == end || text.compare(next, kOr.size(), kOr) != 0) {
      diagnostics.error(locationIn(node, next), "expected 'or' and a default after '$" + keys.names.back() +
                                                    "', found '" + text.substr(next) +
                                                    "'; to calculate with the value, give it a 'let' name of its own");
      return std::nullopt;
    }
    at = std::min(text.find_first_not_of(' ', next + kOr.size()), text.size());
  }
  keys.rest = at;
  return keys;
}

} // namespace reshard
