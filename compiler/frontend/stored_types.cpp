#include "compiler/frontend/frontend.h"

#include <algorithm>
#include <cctype>

namespace reshard {

namespace {

bool digit(char c) { return std::isdigit(static_cast<unsigned char>(c)); }

/// A name in which each number is `#`, as is each placeholder of a declared one.
std::string shapeOf(const std::string &name) {
  std::string shape;
  for (size_t i = 0; i < name.size(); ++i)
    if (name[i] == '{') {
      i = std::min(name.find('}', i), name.size());
      shape += '#';
    } else if (!digit(name[i])) {
      shape += name[i];
    } else if (i == 0 || !digit(name[i - 1])) {
      shape += '#';
    }
  return shape;
}

/// Whether a name is one that a declared name of the same shape stands for: numbers that both say are equal, others
/// values of the variable.
bool matchesDeclared(const std::string &declared, const std::string &name,
                     const std::vector<ir::IndexVariable> &variables) {
  size_t j = 0;
  for (size_t i = 0; i < declared.size(); ++i)
    if (declared[i] == '{') {
      const std::string variable = declared.substr(i + 1, declared.find_first_of(".}", i) - i - 1);
      i = std::min(declared.find('}', i), declared.size());
      int64_t value = 0;
      for (; j < name.size() && digit(name[j]) && value < kMaxIndexValues; ++j)
        value = 10 * value + (name[j] - '0');
      for (const ir::IndexVariable &each : variables)
        if (each.name == variable && value >= each.size)
          return false;
    } else if (j >= name.size() || declared[i] != name[j++]) {
      return false;
    }
  return j == name.size();
}

} // namespace

StoredTypes::StoredTypes(StoredTensors names, Location at) : at_(at) {
  for (auto &entry : names)
    byShape_[shapeOf(entry.first)].push_back(std::move(entry));
}

std::optional<ir::DType> StoredTypes::of(const std::string &declared, const std::vector<ir::IndexVariable> &variables,
                                         Diagnostics &diagnostics) const {
  const auto known = byShape_.find(shapeOf(declared));
  const std::pair<std::string, ir::DType> *first = nullptr;
  if (known != byShape_.end())
    for (const auto &entry : known->second) {
      if (!matchesDeclared(declared, entry.first, variables))
        continue;
      if (first && first->second != entry.second) {
        diagnostics.error(at_, "param '" + declared + "' is stored as " + ir::name(first->second) + " ('" +
                                   first->first + "') and as " + ir::name(entry.second) + " ('" + entry.first +
                                   "'), expected one dtype");
        return std::nullopt;
      }
      if (!first)
        first = &entry;
    }
  return first ? std::optional(first->second) : std::nullopt;
}

} // namespace reshard
