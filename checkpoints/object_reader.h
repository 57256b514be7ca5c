// SPDX-License-Identifier: Apache-2.0
// JSON objects of files, read in one pass.
#pragma once

#include "base/hash.h"
#include "base/status.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace reshard::checkpoints {

/// Reads a JSON object in one pass, which is several times faster than building a tree. Also finds errors that a tree
/// hides: repeated keys and unbounded nesting. Keeps 16 bytes for each key.
class ObjectReader : public nlohmann::json_sax<nlohmann::json> {
public:
  /// `what`: the beginning of an error about the form of the text.
  Status read(const std::string &path, std::string_view text, const char *what = "damaged header") {
    const std::string damaged = "'" + path + "': " + what + ": ";
    const auto parse = [&] {
      return nlohmann::json::sax_parse(text, static_cast<nlohmann::json_sax<nlohmann::json> *>(this));
    };
    const bool parsed = parse();
    if (repeats_) { // a second pass finds its name
      depth_ = -1;
      (void)parse();
      return failed(damaged + "the key '" + repeated_ + "' is repeated");
    }
    if (!problem_.empty())
      return failed("'" + path + "': " + problem_);
    if (!parsed || !object_)
      return failed(damaged + "not a JSON object");
    return nul_.empty() ? Status() : failed("'" + path + "': a name contains a NUL character: '" + nul_ + "'");
  }

protected:
  /// The depth of the innermost object or array around a value; the outermost object has depth 0.
  int depth() const { return depth_; }
  /// The key of the value, or of the object or array around it at that depth; empty in arrays.
  const std::string &keyAt(int depth) const { return levels_[depth].key; }
  /// Ends the reading with an error.
  void refuse(std::string problem) { problem_ = std::move(problem); }
  virtual void onText(const std::string &text) = 0;
  virtual void onNumber(uint64_t number) = 0;
  virtual void onOther() = 0;           // null, a boolean, or a number other than an unsigned integer
  virtual void onBegin(bool array) = 0; // depth(): before it
  virtual void onEnd() {}               // depth(): after it

private:
  struct Level {
    std::string key;
    std::vector<Digest> keys; // so far
  };

  /// Calls a function of the reader. False ends the reading.
  template <class Call> bool tell(Call call) {
    if (!repeats_)
      call();
    return problem_.empty();
  }
  bool begin(bool array) {
    if (depth_ < 0)
      object_ = !array;
    if (depth_ < 0 ? array : !tell([&] { onBegin(array); }))
      return false;
    if (depth_ + 1 == static_cast<int>(levels_.size()))
      return false;
    Level &level = levels_[++depth_];
    level.key.clear();
    level.keys.clear();
    return true;
  }
  bool end() {
    std::vector<Digest> &keys = levels_[depth_].keys;
    std::sort(keys.begin(), keys.end());
    if (const auto twice = std::adjacent_find(keys.begin(), keys.end()); twice != keys.end() && !repeats_) {
      repeats_ = *twice;
      return false;
    }
    --depth_;
    return tell([&] { onEnd(); });
  }
  bool value(void (ObjectReader::*call)()) {
    return depth_ >= 0 && tell([&] { (this->*call)(); });
  }
  bool key(string_t &name) override {
    Level &level = levels_[depth_];
    level.keys.push_back(digestOf(name.data(), name.size()));
    if (repeats_ && level.keys.back() == *repeats_) {
      repeated_ = name;
      return false;
    }
    if (name.find('\0') != std::string::npos) // a C string would end there
      nul_ = name;
    level.key = std::move(name);
    return true;
  }
  bool null() override { return value(&ObjectReader::onOther); }
  bool boolean(bool) override { return value(&ObjectReader::onOther); }
  bool number_integer(number_integer_t) override { return value(&ObjectReader::onOther); }
  bool number_unsigned(number_unsigned_t number) override {
    return depth_ >= 0 && tell([&] { onNumber(number); });
  }
  bool number_float(number_float_t, const string_t &) override { return value(&ObjectReader::onOther); }
  bool string(string_t &text) override {
    return depth_ >= 0 && tell([&] { onText(text); });
  }
  bool binary(binary_t &) override { return false; }
  bool start_object(std::size_t) override { return begin(false); }
  bool end_object() override { return end(); }
  bool start_array(std::size_t) override { return begin(true); }
  bool end_array() override { return end(); }
  bool parse_error(std::size_t, const std::string &, const nlohmann::detail::exception &) override { return false; }

  std::array<Level, 16> levels_;
  int depth_ = -1;
  bool object_ = false;
  std::string problem_, repeated_, nul_;
  std::optional<Digest> repeats_; // a key that an object has twice
};

} // namespace reshard::checkpoints
