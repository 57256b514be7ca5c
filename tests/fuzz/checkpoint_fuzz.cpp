// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any bytes as a file of torch.save, as its pickle, as `.metadata` of torch.distributed.checkpoint, as the
// pickles of two ranks, or as the JSON files of Megatron-Core are refused, or read to the end. The first byte of an
// input chooses.

#include "checkpoints/stored_checkpoint.h"
#include "checkpoints/stored_format.h"
#include "checkpoints/torch_file.h"
#include "tests/fuzz/files.h"

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

using namespace reshard;

namespace {

/// A zip archive with stored members, without checksums.
std::string archiveOf(const std::vector<std::pair<std::string, std::string_view>> &members) {
  const auto number = [](auto value) { return std::string(reinterpret_cast<const char *>(&value), sizeof value); };
  std::string archive, directory;
  for (const auto &[name, data] : members) {
    const uint32_t bytes = static_cast<uint32_t>(data.size());
    const uint16_t nameBytes = static_cast<uint16_t>(name.size());
    const std::string common = std::string(8, '\0') + number(uint32_t{0}) + number(bytes) + number(bytes) +
                               number(nameBytes) + number(uint16_t{0}); // flags, method, time and date; sizes
    const std::string at = number(static_cast<uint32_t>(archive.size()));
    archive += "PK\x03\x04" + std::string(2, '\0') + common + name + std::string(data);
    directory += "PK\x01\x02" + std::string(4, '\0') + common + std::string(10, '\0') + at + name;
  }
  const auto count = static_cast<uint16_t>(members.size());
  return archive + directory + "PK\x05\x06" + std::string(4, '\0') + number(count) + number(count) +
         number(static_cast<uint32_t>(directory.size())) + number(static_cast<uint32_t>(archive.size())) +
         std::string(2, '\0');
}

/// A file of torch.save with this pickle and one storage.
std::string torchFileOf(std::string_view pickle) {
  static const std::string storage(96, '\1');
  return archiveOf({{"archive/data.pkl", pickle}, {"archive/data/0", storage}});
}

Status statusOf(std::string_view archive) {
  tests::put(tests::fuzzFolder() / "input", archive);
  const Result<InputFile> file = InputFile::open(tests::fuzzFolder() / "input");
  if (!file.ok())
    std::abort();
  FilePart part(*file, 0, file->bytes());
  checkpoints::ReadBudget budget;
  budget.add(file->bytes());
  return checkpoints::readTorchFile(part, "input", budget).status();
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size == 0)
    return 0;
  const std::string_view text = tests::textOf(data + 1, size - 1);
  const std::string_view first = text.substr(0, text.size() / 2), second = text.substr(text.size() / 2);
  const auto folder = [](const char *name) {
    std::filesystem::create_directory(tests::fuzzFolder() / name);
    return tests::fuzzFolder() / name;
  };
  switch (data[0] % 5) {
  case 0:
    (void)statusOf(text).ok();
    break;
  case 1: {
    const Status status = statusOf(torchFileOf(text));
    if (status.message().starts_with("input: damaged zip archive")) // the archive itself is right
      std::abort();
    break;
  }
  case 2:
    tests::put(folder("dcp") + "/__0_0.distcp", torchFileOf(second));
    tests::put(folder("dcp") + "/.metadata", text);
    (void)checkpoints::readStoredCheckpoint(folder("dcp")).ok();
    break;
  case 3:
    tests::put(folder("ranks") + "/rank_0.pt", torchFileOf(first));
    tests::put(folder("ranks") + "/rank_1.pt", torchFileOf(second));
    (void)checkpoints::readStoredCheckpoint(folder("ranks")).ok();
    break;
  default:
    tests::put(folder("megatron") + "/metadata.json", text);
    tests::put(folder("megatron") + "/integrity.json", text);
    (void)checkpoints::checkMegatronFormat(folder("megatron")).ok();
    (void)checkpoints::checkIntegrity(folder("megatron"), {}).ok();
    (void)checkpoints::verifyIntegrity(folder("megatron"), 1, {}).ok();
  }
  return 0;
}
