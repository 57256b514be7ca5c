// SPDX-License-Identifier: Apache-2.0
// FlatBuffers may omit empty vectors, and their verifier accepts that: readers take an absent vector as empty.
#pragma once

#include "schema/manifest.h"

namespace reshard::schema {

/// A vector field of a table, or an empty vector if the field is absent.
template <class T> const flatbuffers::Vector<T> &orEmpty(const flatbuffers::Vector<T> *vector) {
  alignas(
      8) static const flatbuffers::uoffset_t kNone[2] = {}; // in memory, a vector is its length and then its elements
  return vector ? *vector : *reinterpret_cast<const flatbuffers::Vector<T> *>(kNone);
}

template <class T> size_t sizeOf(const flatbuffers::Vector<T> *vector) { return vector ? vector->size() : 0; }

} // namespace reshard::schema
