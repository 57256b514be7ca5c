// SPDX-License-Identifier: Apache-2.0
// JSON objects of files, read in one pass.
#pragma once

#include "support/status.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace reshard::analysis {

/// Reads a JSON object in one pass, which is several times faster than building a tree. Also finds errors that a tree
/// hides: repeated keys and unbounded nesting.
class ObjectReader : public nlohmann::json_sax<nlohmann::json> {
public:
  /// `what`: the beginning of an error about the form of the text.
  Status read(const std::string &path, std::string_view text, const char *what = "damaged header") {
    const std::string damaged = "'" + path + "': " + what + ": ";
    if (!nlohmann::json::sax_parse(text, static_cast<nlohmann::json_sax<nlohmann::json> *>(this)) || !object_)
      return failed(damaged + "not a JSON object");
    if (!repeated_.empty())
      return failed(damaged + "the key '" + repeated_ + "' is repeated");
    return nul_.empty() ? Status() : failed("'" + path + "': a name contains a NUL character: '" + nul_ + "'");
  }

protected:
  /// The depth of the innermost object or array around a value; the outermost object has depth 0.
  int depth() const { return depth_; }
  /// The key of the value, or of the object or array around it at that depth; empty in arrays.
  const std::string &keyAt(int depth) const { return levels_[depth].key; }
  virtual void onText(const std::string &text) = 0;
  virtual void onNumber(uint64_t number) = 0;
  virtual void onOther() = 0;           // null, a boolean, or a number other than an unsigned integer
  virtual void onBegin(bool array) = 0; // depth(): before it
  virtual void onEnd() {}               // depth(): after it

private:
  struct Level {
    std::string key;
    std::vector<std::string> few; // its keys so far; once there are many, they are in `many`
    std::unordered_set<std::string> many;
  };

  bool begin(bool array) {
    if (depth_ >= 0)
      onBegin(array);
    else if (object_ = !array; !object_)
      return false;
    if (depth_ + 1 == static_cast<int>(levels_.size()))
      return false;
    Level &level = levels_[++depth_];
    level.key.clear();
    level.few.clear();
    level.many.clear();
    return true;
  }
  bool end() { return --depth_, onEnd(), true; }
  bool other() { return depth_ >= 0 && (onOther(), true); }
  bool key(string_t &name) override {
    constexpr size_t kFew = 8;
    Level &level = levels_[depth_];
    bool known = false;
    if (level.few.size() < kFew) {
      known = std::find(level.few.begin(), level.few.end(), name) != level.few.end();
      level.few.push_back(name);
    } else {
      if (level.many.empty())
        level.many.insert(level.few.begin(), level.few.end());
      known = !level.many.insert(name).second;
    }
    if (known && repeated_.empty())
      repeated_ = name;
    if (name.find('\0') != std::string::npos) // a C string would end there
      nul_ = name;
    level.key = std::move(name);
    return true;
  }
  bool null() override { return other(); }
  bool boolean(bool) override { return other(); }
  bool number_integer(number_integer_t) override { return other(); }
  bool number_unsigned(number_unsigned_t number) override { return depth_ >= 0 && (onNumber(number), true); }
  bool number_float(number_float_t, const string_t &) override { return other(); }
  bool string(string_t &text) override { return depth_ >= 0 && (onText(text), true); }
  bool binary(binary_t &) override { return false; }
  bool start_object(std::size_t) override { return begin(false); }
  bool end_object() override { return end(); }
  bool start_array(std::size_t) override { return begin(true); }
  bool end_array() override { return end(); }
  bool parse_error(std::size_t, const std::string &, const nlohmann::detail::exception &) override { return false; }

  std::array<Level, 16> levels_;
  int depth_ = -1;
  bool object_ = false;
  std::string repeated_, nul_;
};

} // namespace reshard::analysis
