// SPDX-License-Identifier: Apache-2.0
// Reads the files of a source for the compiler.
#pragma once

#include "base/renames.h"
#include "compiler/frontend/stored_tensors.h"

#include "llvm/Support/Error.h"

namespace reshard::tools {

/// What the files of a source contain: for `dtype: stored`, and the chunks of other formats than Hugging Face's.
/// `format`: the source's format in a plan of the same job; a source that was moved since must not change the job.
/// `renames`: other names for the tensors.
llvm::Expected<StoredFiles> readStoredFiles(StoredRequest request, StorageFormat format = StorageFormat::safetensors,
                                            const Renames &renames = {});

} // namespace reshard::tools
