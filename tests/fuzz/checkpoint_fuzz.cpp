// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any bytes as a file of torch.save, as its pickle, or as `.metadata` of torch.distributed.checkpoint are
// refused, or read to the end. The first byte of an input chooses.

#include "analysis/checkpoints/stored_checkpoint.h"
#include "analysis/checkpoints/torch_file.h"
#include "tests/fuzz/files.h"

#include <cstring>

using namespace reshard;

namespace {

/// A zip archive with one stored member, without checksums.
std::string archiveOf(const std::string &name, std::string_view data) {
  const auto number = [](auto value) { return std::string(reinterpret_cast<const char *>(&value), sizeof value); };
  const uint32_t bytes = static_cast<uint32_t>(data.size());
  const uint16_t nameBytes = static_cast<uint16_t>(name.size());
  const std::string common = std::string(8, '\0') + number(uint32_t{0}) + number(bytes) + number(bytes) +
                             number(nameBytes) + number(uint16_t{0}); // flags, method, time and date; sizes
  const std::string member = "PK\x03\x04" + std::string(2, '\0') + common + name + std::string(data);
  const std::string entry = "PK\x01\x02" + std::string(4, '\0') + common + std::string(14, '\0') + name;
  return member + entry + "PK\x05\x06" + std::string(4, '\0') + number(uint16_t{1}) + number(uint16_t{1}) +
         number(static_cast<uint32_t>(entry.size())) + number(static_cast<uint32_t>(member.size())) +
         std::string(2, '\0');
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size == 0)
    return 0;
  const std::string_view text = tests::textOf(data + 1, size - 1);
  switch (data[0] % 3) {
  case 0:
    (void)analysis::readTorchFile(text, "input").ok();
    break;
  case 1: {
    const std::string archive = archiveOf("archive/data.pkl", text);
    const Status status = analysis::readTorchFile(archive, "input").status();
    if (status.message().starts_with("input: damaged zip archive")) // the archive itself is right
      std::abort();
    break;
  }
  default:
    tests::put(tests::fuzzFolder() / "__0_0.distcp", archiveOf("archive/data.pkl", text.substr(text.size() / 2)));
    tests::put(tests::fuzzFolder() / ".metadata", text);
    (void)analysis::readStoredCheckpoint(tests::fuzzFolder().path()).ok();
  }
  return 0;
}
