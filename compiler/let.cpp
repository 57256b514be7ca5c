// `let` names, and the Hugging Face config.json that `$key` reads.

#include "compiler/reading.h"

#include "llvm/Support/JSON.h"

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

/// The config as JSON; null where there is none to read or it has errors, which are reported.
class Config {
public:
  Config(const Node *config, const std::string &folder, Diagnostics &diagnostics) : diagnostics_(diagnostics) {
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

  /// The value of `key`, "a.b" for nested ones. Nothing where it is missing or null and has a default; else
  /// kUnknownValue with an error.
  std::optional<int64_t> find(const std::string &key, Location at, bool hasDefault) const {
    if (!read_) {
      if (!stated_)
        diagnostics_.error(at, "'$" + key + "' without a config, expected 'config: FILE' in the model");
      return kUnknownValue;
    }
    const llvm::json::Value *value = &value_;
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
      end = key.find('.', begin);
      const std::string part = key.substr(begin, end - begin);
      const llvm::json::Object *object = value->getAsObject();
      const llvm::json::Value *next = object ? object->get(part) : nullptr;
      if (!next) {
        if (hasDefault)
          return std::nullopt;
        std::vector<std::string> known;
        if (object)
          for (const auto &[name, each] : *object)
            known.push_back(name.str());
        std::sort(known.begin(), known.end());
        diagnostics_.error(at, "'" + name_ + "' has no key '" + key + "'" + suggestion(part, known));
        return kUnknownValue;
      }
      value = next;
    }
    if (const auto truth = value->getAsBoolean())
      return *truth;
    if (const auto number = value->getAsInteger(); number && *number != kUnknownValue)
      return *number;
    if (value->kind() == llvm::json::Value::Null && hasDefault)
      return std::nullopt;
    diagnostics_.error(at, "key '" + key + "' of '" + name_ + "' is " + kind(*value) +
                               ", expected an integer or a boolean");
    return kUnknownValue;
  }

private:
  static const char *kind(const llvm::json::Value &value) {
    switch (value.kind()) {
    case llvm::json::Value::Null: return "null";
    case llvm::json::Value::Number: return "a number with a fraction or past 2^63";
    case llvm::json::Value::String: return "a string";
    case llvm::json::Value::Array: return "an array";
    default: return "an object";
    }
  }

  Diagnostics &diagnostics_;
  std::string name_;
  llvm::json::Value value_ = nullptr;
  bool stated_ = false, read_ = false;
};

/// `$key` or `$key or EXPRESSION`.
int64_t readKey(const Node &node, const Config &config, const Environment &names, Diagnostics &diagnostics) {
  const std::string &text = node.text;
  auto place = [&](size_t offset) {
    Location at = node.at;
    at.column += static_cast<uint32_t>(offset + node.quoted);
    return at;
  };
  size_t end = 1;
  auto inKey = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '-';
  };
  while (end < text.size() && inKey(text[end]))
    ++end;
  const std::string key = text.substr(1, end - 1);
  if (key.empty()) {
    diagnostics.error(node.at, "expected a key of the config after '$'");
    return kUnknownValue;
  }
  const size_t next = text.find_first_not_of(' ', end);
  constexpr std::string_view kOr = "or ";
  if (next == std::string::npos)
    return config.find(key, node.at, false).value_or(kUnknownValue);
  if (next == end || text.compare(next, kOr.size(), kOr) != 0) {
    diagnostics.error(place(next), "expected 'or' and a default after '$" + key + "', found '" + text.substr(next) +
                                       "'; a 'let' name of its own can be used in expressions");
    return kUnknownValue;
  }
  const size_t begin = text.find_first_not_of(' ', next + kOr.size());
  const Expression otherwise{begin == std::string::npos ? "" : text.substr(begin), place(std::min(begin, text.size()))};
  const auto value = config.find(key, node.at, true);
  if (!value)
    return evaluate(otherwise, names, diagnostics).value_or(kUnknownValue);
  return checkNames(otherwise, names, diagnostics) ? *value : kUnknownValue;
}

int64_t readExpressionOf(const Expression &expression, const Environment &above, const Environment &all,
                         Diagnostics &diagnostics) {
  Diagnostics unknown, unknownAnywhere;
  if (!checkNames(expression, above, unknown) && checkNames(expression, all, unknownAnywhere)) {
    diagnostics.error(expression.at,
                      "'" + expression.text + "' uses a name that 'let' defines further down, expected it above");
    return kUnknownValue;
  }
  return evaluate(expression, above, diagnostics).value_or(kUnknownValue);
}

} // namespace

Environment readLet(const Node *let, const Node *config, const std::string &folder, Diagnostics &diagnostics) {
  Environment names;
  const Config values(config, folder, diagnostics);
  if (!let || !checkMap(*let, "'let'", diagnostics))
    return names;
  Environment all;
  for (const auto &[key, value] : let->entries)
    all[key.text] = kUnknownValue;
  for (const auto &[key, value] : let->entries) {
    const auto name = readIdentifier(key, "a 'let' name", diagnostics);
    if (!name)
      continue;
    const std::string what = "'" + *name + "'";
    int64_t result = kUnknownValue;
    if (value.kind == Node::Kind::scalar && value.text.starts_with('$'))
      result = readKey(value, values, names, diagnostics);
    else if (const auto expression = readExpression(value, what, diagnostics))
      result = readExpressionOf(*expression, names, all, diagnostics);
    names[*name] = result;
  }
  return names;
}

} // namespace reshard
