// What makes a checkpoint a model beside its weights: config.json, generation_config.json, the tokenizer's files, code.
#pragma once

#include <string>
#include <vector>

namespace reshard::tools {

struct ModelFiles {
  std::string folder;
  std::vector<std::string> names; // sorted
  size_t skipped = 0;             // weights, folders and hidden files, which are not among them
};

/// The small files of a folder that are no weights. Throws Failure where it has no config.json, or one that cannot be
/// copied.
ModelFiles findModelFiles(const std::string &folder);
/// Copies them into a folder. Throws Failure where one of that name is there.
void copyModelFiles(const ModelFiles &files, const std::string &folder);

} // namespace reshard::tools
