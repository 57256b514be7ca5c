// SPDX-License-Identifier: Apache-2.0
#include "tools/stored_files.h"

#include "checkpoints/safetensors.h"
#include "checkpoints/stored_checkpoint.h"

#include <filesystem>

namespace reshard::tools {

using namespace checkpoints;

namespace {

/// Reads the headers of a source with one safetensors file for each mesh rank.
llvm::Expected<StoredFiles> readRankFiles(const StoredRequest &request) {
  StoredFiles result;
  for (int64_t meshRank = 0; meshRank < request.meshRanks; ++meshRank) {
    Checkpoint files;
    const std::string path = request.path + "/" + rankFile(static_cast<uint32_t>(meshRank));
    std::error_code unknown;
    if (!std::filesystem::exists(path, unknown))
      continue; // a rank without params
    if (Status status = readSafetensors(path, files); !status.ok())
      return llvm::createStringError(status.message());
    for (const auto &[name, tensor] : files.tensors)
      result.tensors.push_back({name, static_cast<ir::DType>(tensor.dtype), tensor.shape, {}});
  }
  return result;
}

} // namespace

llvm::Expected<StoredFiles> readStoredFiles(StoredRequest request, StorageFormat planned, const Renames &renames) {
  if (storesChunks(planned)) {
    request.required = request.required || request.checkpoint;
    if (!request.format)
      request.format = planned;
  }
  std::error_code unknown;
  if (!request.required && !std::filesystem::exists(request.path, unknown))
    return StoredFiles{};
  StoredFiles result;
  if (request.checkpoint) {
    if (!request.required) {
      const Result<StorageFormat> format = recognizeCheckpoint(request.path);
      if (!format.ok() || (!storesChunks(*format) && !storesChunks(request.format.value_or(*format))))
        return StoredFiles{};
    }
    Result<StoredCheckpoint> stored = readStoredCheckpoint(request.path, request.format);
    if (!stored.ok())
      return llvm::createStringError(stored.status().message());
    if (Status status = renameTensors(*stored, renames, request.path); !status.ok())
      return llvm::createStringError(status.message());
    if (request.format && *request.format != stored->format)
      return llvm::createStringError("'" + request.path + "' has the format '" + name(stored->format) +
                                     "', expected '" + name(*request.format) + "'");
    result.format = stored->format;
    for (const auto &[name, tensor] : stored->tensors) {
      FileTensor &each = result.tensors.emplace_back();
      each = {name, static_cast<ir::DType>(tensor.dtype), tensor.shape, {}};
      for (const StoredChunk &chunk : tensor.chunks)
        each.chunks.push_back({chunk.offsets, chunk.lengths});
    }
  } else {
    llvm::Expected<StoredFiles> files = readRankFiles(request);
    if (!files)
      return files.takeError();
    result = std::move(*files);
  }
  if (result.tensors.empty())
    return llvm::createStringError("'" + request.path + "' contains no " +
                                   (request.checkpoint ? "tensors" : "safetensors file with tensors"));
  return result;
}

} // namespace reshard::tools
