// SPDX-License-Identifier: Apache-2.0
#include "compiler/transfer/staging.h"

#include "llvm/Support/raw_ostream.h"

namespace reshard {

void StagingLimitError::log(llvm::raw_ostream &out) const {
  out << "a staging limit of " << limit_ << " bytes is too small for " << use_ << ", expected at least " << needed_
      << " bytes";
}

} // namespace reshard
