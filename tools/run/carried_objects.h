// SPDX-License-Identifier: Apache-2.0
// The objects of a checkpoint, which are no tensors: those that a target receives, with the same bytes.
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

} // namespace reshard::tools
