// SPDX-License-Identifier: Apache-2.0
// Reads the files of a source for the compiler.
#pragma once

#include "compiler/frontend/stored_tensors.h"

#include "llvm/Support/Error.h"

namespace reshard::tools {

/// What the files of a source contain: for `dtype: stored`, and the chunks of other formats than Hugging Face's.
llvm::Expected<StoredFiles> readStoredFiles(const StoredRequest &request);

} // namespace reshard::tools
