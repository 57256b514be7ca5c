// SPDX-License-Identifier: Apache-2.0
// Creates checkpoints of torch.distributed.checkpoint, and of Megatron-Core.
#pragma once

#include "base/formats/storage_formats.h"
#include "checkpoints/safetensors.h"

#include <string>
#include <string_view>
#include <vector>

namespace reshard::checkpoints {

/// A tensor to be written in chunks: boxes, each row-major, that together are the tensor.
struct ChunkedTensor {
  struct Chunk {
    std::vector<int64_t> offsets, lengths; // by dimension
  };
  std::string name;
  schema::DType dtype = schema::DType::u8;
  std::vector<int64_t> shape;
  std::vector<Chunk> chunks;
};

/// An object to be written: bytes that are not interpreted.
struct ObjectSpec {
  std::string name;
  std::string_view data;
};

/// Whether a checkpoint of this format can hold an object of this name, which has bytes of its own.
bool holdsObject(reshard::StorageFormat format, std::string_view name);

/// Creates `.metadata` and files `__0_N.distcp` of at most `fileBytes`, or of one chunk; the data of tensors is zero. A
/// further file has the objects. Refuses an object with the name of a tensor.
Status createDcp(const std::string &folder, const std::vector<ChunkedTensor> &tensors,
                 const std::vector<ObjectSpec> &objects, int64_t fileBytes);

/// The file of Megatron-Core's common state: what is neither a tensor nor an object of one rank. It is an object of
/// this name.
constexpr const char *kMegatronCommon = "common.pt";

/// The same, with the two further files of Megatron-Core's torch_dist: `metadata.json`, which names the format, and
/// `common.pt`, whose common state is empty if it is not among the objects.
Status createMegatron(const std::string &folder, const std::vector<ChunkedTensor> &tensors,
                      const std::vector<ObjectSpec> &objects, int64_t fileBytes);

} // namespace reshard::checkpoints
