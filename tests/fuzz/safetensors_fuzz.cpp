// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any bytes as a safetensors file are refused, or every byte of its tensors can be read. The first byte of
// an input chooses whether the rest is a file, or a header whose length is put before it.

#include "checkpoints/safetensors.h"
#include "tests/fuzz/files.h"

using namespace reshard;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const std::string path = tests::fuzzFolder() / "model.safetensors";
  if (size == 0)
    return 0;
  std::string file(tests::textOf(data + 1, size - 1));
  if (data[0] % 2 == 1) { // the header ends at its last brace; the data follow
    const uint64_t bytes = file.rfind('}') == std::string::npos ? file.size() : file.rfind('}') + 1;
    file.insert(0, reinterpret_cast<const char *>(&bytes), sizeof bytes);
  }
  tests::put(path, file);
  checkpoints::Checkpoint checkpoint;
  if (!checkpoints::readSafetensors(path, checkpoint).ok())
    return 0;
  unsigned sum = 0;
  for (const auto &[name, tensor] : checkpoint.tensors)
    for (int64_t at = 0; at < tensor.bytes; ++at)
      sum += static_cast<unsigned>(tensor.data[at]);
  volatile unsigned used = sum; // the reads must not be removed
  (void)used;
  return 0;
}
