// FlatBuffers leave empty vectors out, and the verifier takes a plan without them: to us, absent is empty.
#pragma once

#include "schema/manifest.h"

namespace reshard::tools {

/// A vector of a table, or one without elements where there is none.
template <class T> const flatbuffers::Vector<T> &orEmpty(const flatbuffers::Vector<T> *vector) {
  alignas(8) static const flatbuffers::uoffset_t kNone[2] = {}; // a vector is its length, then its elements
  return vector ? *vector : *reinterpret_cast<const flatbuffers::Vector<T> *>(kNone);
}

} // namespace reshard::tools
