// SPDX-License-Identifier: Apache-2.0
#include "executor/api/struct_size.h"

#include <algorithm>
#include <cstring>

namespace reshard {

namespace {

constexpr size_t kMaxStructSize = 4096;

/// The `size` of a struct, its first field.
size_t structSize(const void *given) {
  size_t size = 0;
  std::memcpy(&size, given, sizeof size);
  return size;
}

constexpr const PublicStruct *kPublicStructs[] = {
    &kPublicStruct<reshard_options>,       &kPublicStruct<reshard_store>,   &kPublicStruct<reshard_transform>,
    &kPublicStruct<reshard_transformed>,   &kPublicStruct<reshard_summary>, &kPublicStruct<reshard_endpoint>,
    &kPublicStruct<reshard_param>,         &kPublicStruct<reshard_replica>, &kPublicStruct<reshard_check>,
    &kPublicStruct<reshard_tensor_digest>,
};

} // namespace

bool validSize(const PublicStruct &type, size_t size) { return size >= type.firstSize && size <= kMaxStructSize; }

Status readStruct(const PublicStruct &type, const void *given, void *own) {
  const size_t size = structSize(given);
  if (!validSize(type, size))
    return invalid(std::string(type.name) + ".size: found " + std::to_string(size) + ", expected " +
                   (size > kMaxStructSize ? "at most " + std::to_string(kMaxStructSize)
                                          : std::to_string(type.firstSize) + " or more") +
                   "; initialize the struct with " + type.initializer);
  const auto *bytes = static_cast<const std::byte *>(given);
  const size_t known = std::min(size, type.size);
  const std::byte *set = std::find_if(bytes + known, bytes + size, [](std::byte byte) { return byte != std::byte{0}; });
  if (set != bytes + size)
    return invalid(std::string(type.name) + ": found a field that is not 0 at byte " + std::to_string(set - bytes) +
                   ", expected a struct of " + std::to_string(type.size) +
                   " bytes: the program was compiled with a newer header; install the libreshard of that version");
  std::memset(own, 0, type.size);
  std::memcpy(own, given, known);
  std::memcpy(own, &type.size, sizeof type.size);
  return {};
}

bool writeStruct(const PublicStruct &type, const void *filled, void *given) {
  const size_t size = structSize(given);
  if (!validSize(type, size))
    return false;
  const size_t written = std::min(size, type.size);
  std::memcpy(given, filled, written);
  std::memcpy(given, &written, sizeof written);
  return true;
}

} // namespace reshard

size_t reshard_struct_size(const char *name) {
  for (const reshard::PublicStruct *type : reshard::kPublicStructs)
    if (name && std::strcmp(name, type->name) == 0)
      return type->size;
  return 0;
}
