// SPDX-License-Identifier: Apache-2.0
// The files of a model other than its weights: config.json, generation_config.json, the tokenizer's files, code.
#pragma once

#include "base/status.h"

#include <string>
#include <vector>

namespace reshard::tools {

struct ModelFiles {
  std::string folder;
  std::vector<std::string> names; // sorted
  size_t skipped = 0;             // number of weights, folders and hidden files
};

/// The small files of a folder that are not weights. An error if it has no config.json, or a file that cannot be
/// copied.
Result<ModelFiles> findModelFiles(const std::string &folder);
/// A digest of the files' names and contents, hexadecimal. An error if one cannot be read.
Result<std::string> digestOf(const ModelFiles &files);
/// Copies the files into a folder. An error if a file of the same name exists there.
Status copyModelFiles(const ModelFiles &files, const std::string &folder);

} // namespace reshard::tools
