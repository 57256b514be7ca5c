// SPDX-License-Identifier: Apache-2.0
// Parses JSON with the SAX interface of nlohmann::json, so that errors have a position in the file, and finds the value
// that a `$key` names.
#include "compiler/frontend/config.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <iterator>
#include <map>

namespace reshard {

namespace {

using Json = nlohmann::json;

/// Characters of a text, from the first to the end. `at` receives the offset of the next one.
class Characters {
public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char *;
  using reference = const char &;

  Characters(const std::string &text, size_t begin, size_t *at) : text_(&text), at_(begin), shared_(at) {}
  reference operator*() const { return (*text_)[at_]; }
  Characters &operator++() {
    ++at_;
    if (shared_)
      *shared_ = at_;
    return *this;
  }
  bool operator==(const Characters &other) const { return at_ == other.at_; }
  bool operator!=(const Characters &other) const { return at_ != other.at_; }

private:
  const std::string *text_;
  size_t at_;
  size_t *shared_;
};

/// Builds the value of a JSON text. Reports errors of syntax, duplicate keys, of which the library silently keeps one,
/// and deep nesting.
class Reader : public nlohmann::json_sax<Json> {
public:
  Reader(uint32_t file, Diagnostics &diagnostics)
      : file_(file), text_(diagnostics.text(file)), diagnostics_(diagnostics) {}

  /// False after an error that leaves no value.
  bool read(Json &root) {
    root_ = &root;
    return Json::sax_parse(Characters(text_, 0, &at_), Characters(text_, text_.size(), nullptr),
                           static_cast<nlohmann::json_sax<Json> *>(this));
  }

private:
  static constexpr size_t kMaxDepth = 64;

  /// An object or array that is not complete. Keys have the offset of their first byte.
  struct Level {
    Json *value;
    std::map<std::string, size_t> keys;
    Json *next = nullptr; // the value of an object's last key
  };

  Location location(size_t offset) const {
    const std::string_view before = std::string_view(text_).substr(0, offset);
    const size_t line = before.rfind('\n') + 1; // 0 if there is none
    return {file_, static_cast<uint32_t>(1 + std::count(before.begin(), before.end(), '\n')),
            static_cast<uint32_t>(offset - line + 1)};
  }

  Json *add(Json value) {
    Json *place = root_;
    if (!open_.empty() && open_.back().value->is_array())
      place = &open_.back().value->emplace_back();
    else if (!open_.empty())
      place = open_.back().next;
    *place = std::move(value);
    return place;
  }
  bool begin(Json value) {
    if (open_.size() == kMaxDepth) {
      diagnostics_.error(location(at_ - 1),
                         "arrays and objects nested more than " + std::to_string(kMaxDepth) + " deep");
      return false;
    }
    open_.push_back({add(std::move(value)), {}});
    return true;
  }
  bool end() { return open_.pop_back(), true; }

  bool key(string_t &name) override {
    size_t begin = at_ - 2; // the text between the quotes begins here; found from its end
    auto escaped = [&] { return (begin - text_.find_last_not_of('\\', begin - 1)) % 2 == 0; };
    while (text_[begin] != '"' || escaped())
      --begin;
    Level &level = open_.back();
    const auto [known, added] = level.keys.emplace(name, begin);
    if (!added) {
      diagnostics_.error(location(begin), "duplicate key '" + name + "'");
      diagnostics_.note(location(known->second), "first defined here");
    }
    level.next = &(*level.value)[name];
    return true;
  }
  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t &) override { return add(value); }
  bool string(string_t &value) override { return add(std::move(value)); }
  bool binary(binary_t &) override { return false; }
  bool start_object(std::size_t) override { return begin(Json::object()); }
  bool end_object() override { return end(); }
  bool start_array(std::size_t) override { return begin(Json::array()); }
  bool end_array() override { return end(); }

  bool parse_error(std::size_t position, const std::string &token, const nlohmann::detail::exception &error) override {
    std::string message = error.what(); // "[json.exception…] parse error at line 1, column 2: syntax error … - MESSAGE"
    for (const std::string_view before : {"] ", ": ", " - "})
      if (const size_t found = message.find(before); found != std::string::npos)
        message.erase(0, found + before.size());
    // A value that is valid by itself is unexpected, and its first byte is reported; otherwise the last byte that was
    // read. `token` also has the punctuation before a literal.
    const std::string value = token.substr(std::min(token.find_first_not_of(" {}[],:"), token.size()));
    const size_t bytes = Json::accept(value) ? value.size() : 1;
    diagnostics_.error(location(position - std::min(position, bytes)), "not JSON: " + message);
    return false;
  }

  const uint32_t file_;
  const std::string &text_;
  Diagnostics &diagnostics_;
  Json *root_ = nullptr;
  size_t at_ = 0; // the offset of the next character to parse
  std::vector<Level> open_;
};

/// The value as an integer, if it is one: 8, 8.0, 8e3.
std::optional<int64_t> integerOf(const Json &value) {
  if (value.is_number_unsigned())
    return value.get<uint64_t>() <= INT64_MAX ? std::optional(value.get<int64_t>()) : std::nullopt;
  if (value.is_number_integer())
    return value.get<int64_t>();
  const double number = value.is_number_float() ? value.get<double>() : 0.5;
  constexpr double kEnd = 9223372036854775808.0; // 2^63
  return number >= -kEnd && number < kEnd && std::trunc(number) == number ? std::optional(static_cast<int64_t>(number))
                                                                          : std::nullopt;
}

/// The type of a value that is not an integer or a boolean, in error messages.
const char *kind(const Json &value) {
  switch (value.type()) {
  case Json::value_t::null:
    return "null";
  case Json::value_t::string:
    return "a string";
  case Json::value_t::array:
    return "an array";
  case Json::value_t::object:
    return "an object";
  default:
    return "a number with a fraction or past 2^63";
  }
}

} // namespace

Config::Config(const Node *config, const std::string &folder, Diagnostics &diagnostics) : diagnostics_(diagnostics) {
  if (!config)
    return;
  stated_ = true;
  const auto path = readText(*config, "'config'", diagnostics);
  const auto file = path ? readFile(joinPath(folder, *path), config->at, diagnostics) : std::nullopt;
  if (!file)
    return;
  name_ = *path;
  auto value = std::make_shared<Json>();
  if (!Reader(*file, diagnostics).read(*value))
    return;
  if (value->is_object())
    value_ = std::move(value);
  else
    diagnostics.error({*file, 1, 1}, "expected a JSON object for a config");
}

const Json *Config::look(const std::string &key, std::string &last, const Json *&object) const {
  const Json *value = value_.get();
  for (size_t begin = 0, end = 0; value && end != std::string::npos; begin = end + 1) {
    end = key.find('.', begin);
    last = key.substr(begin, end - begin);
    object = value->is_object() ? value : nullptr;
    value = object && object->contains(last) ? &object->at(last) : nullptr;
  }
  return value;
}

std::pair<const Json *, std::string> Config::find(const std::vector<std::string> &keys, Location at,
                                                  bool hasDefault) const {
  if (!value_) {
    if (!stated_)
      diagnostics_.error(at, "'$" + keys[0] +
                                 "' reads the config, but the model has no 'config'; add 'config: FILE' to the model");
    return {};
  }
  constexpr const char *kText = "text_config";
  const bool text = value_->contains(kText) && value_->at(kText).is_object();
  std::pair<const Json *, std::string> null;
  std::string names, last;
  const Json *object = nullptr;
  for (const std::string &key : keys) {
    const Json *value = look(key, last, object), *top = object;
    if (!value && text) { // a multimodal model: its language model has the numbers
      value = look(kText + ("." + key), last, object);
      object = top ? top : object;
    }
    if (value) {
      if (!value->is_null())
        return {value, key};
      null = {value, key};
    }
    names += (names.empty() ? "'" : " and no '") + key + "'";
  }
  if (hasDefault || null.first)
    return hasDefault ? std::pair<const Json *, std::string>() : null;
  std::vector<std::string> known;
  if (object && keys.size() == 1)
    for (const auto &[name, each] : object->items()) // sorted
      known.push_back(name);
  if (text && keys.size() == 1)
    for (const auto &[name, each] : value_->at(kText).items())
      known.push_back(name);
  diagnostics_.error(at, "'" + name_ + "' has no key " + names + (text ? ", and its 'text_config' has none" : "") +
                             suggestion(last, known));
  return {};
}

std::optional<int64_t> Config::number(const std::vector<std::string> &keys, Location at, bool hasDefault) const {
  const auto [value, key] = find(keys, at, hasDefault);
  if (!value)
    return hasDefault && value_ ? std::nullopt : std::optional(kUnknownValue);
  if (value->is_boolean())
    return value->get<bool>();
  if (value->is_array())
    return static_cast<int64_t>(value->size());
  if (const auto number = integerOf(*value); number && *number != kUnknownValue)
    return number;
  diagnostics_.error(at, "key '" + key + "' of '" + name_ + "' is " + kind(*value) +
                             ", expected an integer, a boolean or an array");
  return kUnknownValue;
}

std::optional<Config::Texts> Config::texts(const std::vector<std::string> &keys, Location at) const {
  const auto [value, key] = find(keys, at, false);
  if (!value)
    return std::nullopt;
  if (value->is_string())
    return Texts{false, {value->get<std::string>()}};
  if (value->is_array() && std::all_of(value->begin(), value->end(), [](const Json &item) { return item.is_string(); }))
    return Texts{true, value->get<std::vector<std::string>>()};
  diagnostics_.error(at, "key '" + key + "' of '" + name_ + "' is " +
                             (value->is_array() ? "an array with items that are not strings" : kind(*value)) +
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
