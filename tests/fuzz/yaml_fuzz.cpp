// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any text is a valid job or gives an error. Inputs that could name existing files are skipped.

#include "compiler/frontend/frontend.h"
#include "tests/lib/folder.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <unistd.h>

namespace {

/// The job's path, in an empty temporary folder. That becomes the current folder, so that files that a job includes do
/// not exist.
const std::string &jobPath() {
  static const reshard::tests::TemporaryFolder folder;
  static const std::string path = [] {
    if (chdir(folder.path().c_str()) != 0)
      std::abort();
    return folder / "job.yaml";
  }();
  return path;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const std::string text(reinterpret_cast<const char *>(data), size);
  for (const char *absolute : {": /", "\"/", "'/", "- /", "../"}) // no devices, no existing files
    if (text.find(absolute) != std::string::npos)
      return -1;
  FILE *file = std::fopen(jobPath().c_str(), "wb");
  if (!file || std::fwrite(data, 1, size, file) != size || std::fclose(file) != 0)
    std::abort();
  reshard::Diagnostics diagnostics;
  const auto job = reshard::readJob(jobPath(), {}, diagnostics);
  if (job.has_value() != diagnostics.ok())
    std::abort();
  if (job)
    reshard::resolve(*job, diagnostics);
  const std::string message = diagnostics.text();
  return message.size() > (size_t{1} << 20) ? std::abort(), 0 : 0;
}
