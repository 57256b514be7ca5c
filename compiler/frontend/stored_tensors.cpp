// SPDX-License-Identifier: Apache-2.0
// Finds the stored dtype of a declared param, for `dtype: stored`. A declared name and the stored names that match it
// are equal after each number and placeholder is replaced by `#`; this is the lookup key.

#include "compiler/frontend/frontend.h"

#include <algorithm>
#include <llvm/ADT/StringExtras.h>

namespace reshard {

namespace {

/// The lookup key of a name: each number and each placeholder is replaced by `#`.
std::string keyOf(const std::string &name) {
  std::string key;
  for (size_t i = 0; i < name.size(); ++i)
    if (name[i] == '{') {
      i = std::min(name.find('}', i), name.size());
      key += '#';
    } else if (!llvm::isDigit(name[i])) {
      key += name[i];
    } else if (i == 0 || !llvm::isDigit(name[i - 1])) {
      key += '#';
    }
  return key;
}

/// Whether a stored name matches a declared name with the same key: numbers in the declared name are equal, and numbers
/// at its placeholders are values of the index variable.
bool matchesDeclared(const std::string &declared, const std::string &name,
                     const std::vector<ir::IndexVariable> &variables) {
  size_t j = 0;
  for (size_t i = 0; i < declared.size(); ++i)
    if (declared[i] == '{') {
      const std::string variable = declared.substr(i + 1, declared.find_first_of(".}", i) - i - 1);
      i = std::min(declared.find('}', i), declared.size());
      int64_t value = 0;
      for (; j < name.size() && llvm::isDigit(name[j]) && value < kMaxIndexValues; ++j)
        value = 10 * value + (name[j] - '0');
      for (const ir::IndexVariable &each : variables)
        if (each.name == variable && value >= each.size)
          return false;
    } else {
      if (j >= name.size() || declared[i] != name[j])
        return false;
      ++j;
    }
  return j == name.size();
}

} // namespace

StoredTypes::StoredTypes(const StoredFiles &files, Location at) : at_(at) {
  for (const FileTensor &tensor : files.tensors)
    byKey_[keyOf(tensor.name)].emplace_back(tensor.name, tensor.dtype);
}

std::optional<ir::DType> StoredTypes::of(const std::string &declared, const std::vector<ir::IndexVariable> &variables,
                                         Diagnostics &diagnostics) const {
  const auto known = byKey_.find(keyOf(declared));
  const std::pair<std::string, ir::DType> *first = nullptr;
  if (known != byKey_.end())
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
