// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any text is a valid job or gives an error. Inputs that could name existing files are skipped.

#include "tests/fuzz/files.h"
#include "tests/fuzz/read_job.h"

using namespace reshard;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const std::string path = tests::fuzzFolder() / "job.yaml";
  if (tests::namesExistingFiles(tests::textOf(data, size)))
    return -1;
  tests::put(path, tests::textOf(data, size));
  tests::readAndResolve(path);
  return 0;
}
