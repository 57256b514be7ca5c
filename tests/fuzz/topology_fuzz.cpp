// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any text is a valid topology or gives an error.

#include "base/yaml/topology.h"
#include "tests/fuzz/files.h"

using namespace reshard;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const std::string path = tests::fuzzFolder() / "topology.yaml";
  tests::put(path, tests::textOf(data, size));
  Diagnostics diagnostics;
  if (readTopologyFile(path, diagnostics).has_value() != diagnostics.ok())
    std::abort();
  return 0;
}
