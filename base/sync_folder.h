// SPDX-License-Identifier: Apache-2.0
// Writes files to their device.
#pragma once

#include "base/status.h"

#include <string>

namespace reshard {

/// Waits until everything in a folder is on its device: all files, also what was written to mappings of them, and all
/// folders. An error of the device or of a full file system that occurs only now is returned; it names the file. A file
/// that another process renames or removes meanwhile is left out.
Status syncFolder(const std::string &folder);
/// The same for one file, or for the names in one folder.
Status syncFile(const std::string &path);

} // namespace reshard
