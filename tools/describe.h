// A starting model YAML from what a checkpoint's headers say.
#pragma once

#include "tools/safetensors.h"

#include <string>

namespace reshard::tools {

/// The model of a checkpoint: numbers in names become index variables (`layers.7` -> `layers.{layer}`, `weight3` ->
/// `weight{weight}`), tensors of equal name, shape and dtype one pattern, with `where` for the values that there are. A
/// number that does not fit a pattern of its name stays as it is. `origin` stands in the first comment; `config` is
/// the path of the config.json, or empty.
std::string describeModel(const TensorViews &tensors, const std::string &origin, const std::string &config);

} // namespace reshard::tools
