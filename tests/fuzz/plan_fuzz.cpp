// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any bytes as a plan are refused, or read to the end. An input is a file, or a list of edits of a small
// valid plan, compressed or not, with or without updated digests. With them, the fuzzer gets past the container to the
// FlatBuffers verifier and the checks of the manifest and the segments, or to libzstd.

#include "tests/schema/digests.h"
#include "tests/schema/support.h"

#include <cstdlib>
#include <sys/mman.h>
#include <unistd.h>

using namespace reshard;

namespace {

std::string goodPlan(bool compress) {
  const test::TemporaryFolder folder;
  test::writeTiny(folder / "plan", compress);
  return test::readFile(folder / "plan");
}

/// Applies edits of 7 bytes each: offset (2 bytes), width (1, 2, 4 or 8), value (4 bytes, sign-extended).
std::string edited(std::string file, const uint8_t *data, size_t size) {
  for (; size >= 7; data += 7, size -= 7) {
    uint16_t at = 0;
    int32_t value = 0;
    std::memcpy(&at, data, 2);
    std::memcpy(&value, data + 3, 4);
    const size_t width = size_t{1} << (data[2] & 3), offset = at % (file.size() - 8);
    const int64_t wide = data[2] & 4 ? static_cast<int64_t>(value) << 32 : value;
    std::memcpy(file.data() + offset / width * width, &wide, width);
  }
  return file;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const std::string good = goodPlan(false), compressed = goodPlan(true);
  if (size == 0)
    return 0;
  std::string file = data[0] & 1 ? std::string(data + 1, data + size)
                                 : edited(data[0] >> 2 == 1 ? compressed : good, data + 1, size - 1);
  if (data[0] & 2 && file.size() >= 128)
    test::updateDigests(file);
  const int memory = ::memfd_create("plan", 0);
  if (memory < 0 || ::write(memory, file.data(), file.size()) != static_cast<ssize_t>(file.size()))
    std::abort();
  test::readAll("/proc/self/fd/" + std::to_string(memory));
  ::close(memory);
  return 0;
}
