// SPDX-License-Identifier: Apache-2.0
// The formats of files that a storage endpoint may have, by the number that plans store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

namespace reshard {

enum class StorageFormat : uint8_t {
  safetensors,     ///< one file, or a folder as Hugging Face writes it; with a mesh one file for each mesh rank
  dcp_safetensors, ///< torch.distributed.checkpoint's HuggingFaceStorageWriter(save_distributed=True)
  dcp,             ///< torch.distributed.checkpoint
  megatron,        ///< Megatron-Core's torch_dist: dcp and metadata.json
  torch_save,      ///< one file of torch.save
};

/// In YAML, IR text and reports.
inline constexpr const char *kStorageFormatNames[] = {"safetensors", "dcp-safetensors", "dcp", "megatron",
                                                      "torch-save"};
/// In text for people.
inline constexpr const char *kStorageFormatTitles[] = {"safetensors", "DCP safetensors", "DCP", "Megatron torch_dist",
                                                       "torch.save"};

constexpr const char *name(StorageFormat format) { return kStorageFormatNames[static_cast<size_t>(format)]; }
constexpr const char *titleOf(StorageFormat format) { return kStorageFormatTitles[static_cast<size_t>(format)]; }

/// Whether reshard writes a tensor of a checkpoint in several chunks. Readers of `safetensors` and `dcp_safetensors`
/// load parts of a chunk, so that one is enough; a `torch_save` file has whole tensors.
constexpr bool writesChunks(StorageFormat format) {
  return format == StorageFormat::dcp || format == StorageFormat::megatron;
}

/// The format of a name; nullopt if there is none.
constexpr std::optional<StorageFormat> storageFormatNamed(std::string_view name) {
  for (size_t i = 0; i < std::size(kStorageFormatNames); ++i)
    if (name == kStorageFormatNames[i])
      return static_cast<StorageFormat>(i);
  return std::nullopt;
}

} // namespace reshard
