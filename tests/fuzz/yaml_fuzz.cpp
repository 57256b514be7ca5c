// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any text is a valid job or gives an error. Inputs that could name existing files are skipped.

#include "compiler/frontend/frontend.h"
#include "tests/fuzz/files.h"

using namespace reshard;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const std::string path = tests::fuzzFolder() / "job.yaml";
  if (tests::namesExistingFiles(tests::textOf(data, size)))
    return -1;
  tests::put(path, tests::textOf(data, size));
  Diagnostics diagnostics;
  const auto job = readJob(path, {}, diagnostics);
  if (job.has_value() != diagnostics.ok())
    std::abort();
  if (job)
    resolve(*job, diagnostics);
  if (diagnostics.text().size() > (size_t{1} << 20))
    std::abort();
  return 0;
}
