// SPDX-License-Identifier: Apache-2.0
// Files of torch.save, laid out before their data is known: the data is written in place later.
#pragma once

#include "base/mapped_file.h"
#include "checkpoints/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace reshard::checkpoints {

/// A zip archive as torch.save writes it, of one tensor or of a dictionary of tensors. The checksums of the tensors'
/// data are 0, as torch.serialization.set_crc32_options(False) has them: torch.load does not compare them.
class TorchArchive {
public:
  enum class Content { tensor, dictionary };
  /// `tensors`: exactly one for Content::tensor.
  TorchArchive(const std::vector<TensorSpec> &tensors, Content content);

  uint64_t bytes() const { return bytes_; }
  /// Adds everything but the data to the parts of a file in which the archive begins at `begin`. The parts refer to
  /// this object.
  void addTo(std::vector<MappedFile::Part> &parts, uint64_t begin) const;

private:
  std::vector<std::pair<uint64_t, std::string>> texts_; // by position
  uint64_t bytes_ = 0;
};

/// Creates a file of torch.save with a dictionary of tensors; the data is zero.
Status createTorchFile(const std::string &path, const std::vector<TensorSpec> &tensors);

} // namespace reshard::checkpoints
