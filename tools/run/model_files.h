// SPDX-License-Identifier: Apache-2.0
// The files of a model other than its weights: config.json, generation_config.json, the tokenizer's files, code.
#pragma once

#include <string>
#include <vector>

namespace reshard::tools {

struct ModelFiles {
  std::string folder;
  std::vector<std::string> names; // sorted
  size_t skipped = 0;             // number of weights, folders and hidden files
};

/// The small files of a folder that are not weights. Throws Failure if it has no config.json, or a file that cannot be
/// copied.
ModelFiles findModelFiles(const std::string &folder);
/// A digest of the files' names and contents, hexadecimal. Throws Failure if one cannot be read.
std::string digestOf(const ModelFiles &files);
/// Copies the files into a folder. Throws Failure if a file of the same name exists there.
void copyModelFiles(const ModelFiles &files, const std::string &folder);

} // namespace reshard::tools
