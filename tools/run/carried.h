// SPDX-License-Identifier: Apache-2.0
// What targets receive beside tensors, with the same bytes: the objects of the source's checkpoint, and the other files
// of a model.
#pragma once

#include "base/mapped_file.h"
#include "base/renames.h"
#include "base/status.h"
#include "checkpoints/stored_checkpoint.h"
#include "checkpoints/stored_format.h"
#include "executor/load/load.h"

#include <map>
#include <set>
#include <string>
#include <vector>

namespace reshard::tools {

/// How the names of objects are chosen and changed.
struct ObjectRules {
  std::vector<std::string> leave; // globs: objects that no target receives
  Renames renames;                // their names in the targets
  bool allowExtra = false;        // leave out the objects that a target cannot hold
};

/// The objects of a plan's source that all of its targets receive.
class CarriedObjects {
public:
  /// Chooses among the objects of the source at `path`. Each that is left out is added to `left`. An error names the
  /// objects that a target cannot hold, unless rules.allowExtra, a glob that matches none, a name that two get, and
  /// one that a tensor of a target has.
  Status choose(const Plan &plan, const std::string &path,
                const std::map<std::string, checkpoints::StoredObject> &objects, const ObjectRules &rules,
                std::set<std::string> &left);

  const std::vector<checkpoints::ObjectSpec> &objects() const { return objects_; }
  /// A digest of the names and bytes of the objects, hexadecimal.
  std::string digest() const;

private:
  Status map(const std::string &path, const std::string &name, const checkpoints::StoredObject &object,
             std::string renamed);

  std::map<std::string, MappedFile> files_;
  std::vector<checkpoints::ObjectSpec> objects_; // by name; their data is in files_
};

/// The files of a model other than its weights: config.json, generation_config.json, the tokenizer's files, code.
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
