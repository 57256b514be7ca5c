// SPDX-License-Identifier: Apache-2.0
// Structs of the C API between programs and libraries of different versions (reshard.h, "Structs"). A later version
// appends fields and leaves no padding among them: the bytes that an older library does not know must be 0.
#pragma once

#include "base/status.h"
#include "reshard/reshard_plan.h"

#include <cstddef>

namespace reshard {

/// A struct of the C API.
struct PublicStruct {
  const char *name;
  const char *initializer; // its macro; nullptr if only the library makes such structs
  size_t size;             // in this version
  size_t firstSize;        // in the first version; never changes
};

// The end of the last field of the first version.
#define RESHARD_END_OF(type, field) (offsetof(type, field) + sizeof(type::field))
template <class Struct> inline constexpr PublicStruct kPublicStruct{};
template <>
inline constexpr PublicStruct kPublicStruct<reshard_options>{
    "reshard_options", "RESHARD_OPTIONS_INITIALIZER", sizeof(reshard_options), RESHARD_END_OF(reshard_options, secret)};
template <>
inline constexpr PublicStruct kPublicStruct<reshard_store>{"reshard_store", "RESHARD_STORE_INITIALIZER",
                                                           sizeof(reshard_store), RESHARD_END_OF(reshard_store, get)};
template <>
inline constexpr PublicStruct kPublicStruct<reshard_transform>{"reshard_transform", "RESHARD_TRANSFORM_INITIALIZER",
                                                               sizeof(reshard_transform),
                                                               RESHARD_END_OF(reshard_transform, user)};
template <>
inline constexpr PublicStruct kPublicStruct<reshard_transformed>{
    "reshard_transformed", nullptr, sizeof(reshard_transformed), RESHARD_END_OF(reshard_transformed, stream)};
template <>
inline constexpr PublicStruct kPublicStruct<reshard_summary>{"reshard_summary", "RESHARD_SUMMARY_INITIALIZER",
                                                             sizeof(reshard_summary),
                                                             RESHARD_END_OF(reshard_summary, arena_bytes)};
template <>
inline constexpr PublicStruct kPublicStruct<reshard_endpoint>{"reshard_endpoint", "RESHARD_ENDPOINT_INITIALIZER",
                                                              sizeof(reshard_endpoint),
                                                              RESHARD_END_OF(reshard_endpoint, rank_count)};
template <>
inline constexpr PublicStruct kPublicStruct<reshard_param>{"reshard_param", nullptr, sizeof(reshard_param),
                                                           RESHARD_END_OF(reshard_param, bytes)};
template <>
inline constexpr PublicStruct kPublicStruct<reshard_replica>{"reshard_replica", nullptr, sizeof(reshard_replica),
                                                             RESHARD_END_OF(reshard_replica, reserved)};
template <>
inline constexpr PublicStruct kPublicStruct<reshard_check>{
    "reshard_check", "RESHARD_CHECK_INITIALIZER", sizeof(reshard_check), RESHARD_END_OF(reshard_check, reserved)};
template <>
inline constexpr PublicStruct kPublicStruct<reshard_tensor_digest>{
    "reshard_tensor_digest", nullptr, sizeof(reshard_tensor_digest), RESHARD_END_OF(reshard_tensor_digest, digest)};
#undef RESHARD_END_OF

/// Whether a caller of any version can have this `size`. A size above 4096 is a struct without an initializer.
bool validSize(const PublicStruct &type, size_t size);

/// Copies the struct `given` of a caller of any version to `own` of this version; fields that the caller's version
/// lacks become 0. Errors are of kind `invalid`.
Status readStruct(const PublicStruct &type, const void *given, void *own);
template <class Struct> Status readStruct(const Struct *given, Struct &own) {
  return readStruct(kPublicStruct<Struct>, given, &own);
}

/// Copies `filled` of this version to the struct `given` of a caller of any version, and sets its `size` to the number
/// of bytes written. Returns false, and writes nothing, if the `size` of `given` is not valid.
bool writeStruct(const PublicStruct &type, const void *filled, void *given);
template <class Struct> bool writeStruct(const Struct &filled, Struct *given) {
  return writeStruct(kPublicStruct<Struct>, &filled, given);
}

} // namespace reshard
