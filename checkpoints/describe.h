// SPDX-License-Identifier: Apache-2.0
// Writes a first model YAML from the headers of a checkpoint.
#pragma once

#include "checkpoints/stored_checkpoint.h"

#include <map>
#include <string>

namespace reshard::checkpoints {

/// The YAML text of a checkpoint's model. Numbers in names become index variables (`layers.7` -> `layers.{layer}`,
/// `weight3` -> `weight{weight}`). Tensors of equal name, shape and dtype become one tensor pattern, with `where` for
/// index values that do not cover their range. Tensors that fit no pattern keep their names. `origin` is named in the
/// first comment; `config` is the path of config.json, or empty.
std::string describeModel(const std::map<std::string, StoredTensor> &tensors, const std::string &origin,
                          const std::string &config);

} // namespace reshard::checkpoints
