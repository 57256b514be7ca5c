// SPDX-License-Identifier: Apache-2.0
// Describes the params that hold codes or scales, for reports.
#pragma once

#include "base/status.h"
#include "executor/load/load.h"
#include "schema/manifest.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace reshard::report {

/// Where a param is quantized: held: already in the source; arrival: by the receiver, as bytes arrive; staged: by the
/// receiver, when all bytes have arrived; sender: by the sender; passthrough: codes and scales are sent unchanged.
enum class QuantizedBy { held, arrival, staged, sender, passthrough };

/// How a param that holds codes or scales is stored and quantized.
struct QuantizedForm {
  reshard::Quantization format;
  QuantizedBy by;
  reshard::ScaleLayout scaleLayout;
  bool codes;   // false: scales
  int32_t view; // the param number of the target's view through which it is written; -1: none
};

/// The form of each param of an endpoint; empty for params that hold neither codes nor scales.
std::vector<std::optional<QuantizedForm>> quantizedForms(const schema::Manifest &manifest, uint32_t endpoint);

/// The JSON key ("on_arrival") and the text ("by the receiver on arrival") of a value.
struct QuantizedByName {
  QuantizedBy by;
  const char *key, *words;
};
inline constexpr QuantizedByName kQuantizedByNames[] = {
    {QuantizedBy::held, "held", "as in the source"},
    {QuantizedBy::arrival, "on_arrival", "by the receiver on arrival"},
    {QuantizedBy::staged, "staged", "by the receiver after staging"},
    {QuantizedBy::sender, "by_sender", "by the sender"},
    {QuantizedBy::passthrough, "passthrough", "sent unchanged"}};

/// The number of tensor patterns for codes and scales that the compiler added to those of the model.
size_t derivedTensorPatterns(const schema::Manifest &manifest);

/// Counts of one endpoint.
struct QuantizedCounts {
  std::map<QuantizedBy, std::map<reshard::Quantization, int64_t>> params; // instances of codes, over all mesh ranks
  int64_t sends = 0; // instances of source params that are quantized for sending
};
QuantizedCounts countQuantized(const schema::Manifest &manifest, uint32_t endpoint);

/// The largest staging of a rank: bytes in its arena for elements to quantize, scales and amax values. Reads the
/// segments if elements are staged.
Result<uint64_t> peakStagedBytes(const Plan &plan);

} // namespace reshard::report
