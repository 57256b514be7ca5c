// How the params of a plan come to stand quantised, for reports.
#pragma once

#include "executor/load.h"
#include "schema/manifest.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace reshard::tools {

/// Who quantises: nobody, of the source; the receiver where bytes come, or when it has gathered all; the sender;
/// nobody, since codes and scales pass through.
enum class QuantizedBy { held, arrival, staged, sender, passthrough };

struct StorageForm {
  schema::Quantization format;
  QuantizedBy by;
  bool swizzled;
  bool codes;   // or scales
  int32_t view; // of a target, by way of which it is written; -1: none
};

/// Of each param of an endpoint that stands quantised, codes and scales alike.
std::vector<std::optional<StorageForm>> storageForms(const schema::Manifest &manifest, uint32_t endpoint);

/// In JSON and in words: "on_arrival", "by the receiver on arrival".
struct QuantizedByName {
  QuantizedBy by;
  const char *key, *words;
};
inline constexpr QuantizedByName kQuantizedByNames[] = {
    {QuantizedBy::held, "held", "as the source has them"},
    {QuantizedBy::arrival, "on_arrival", "by the receiver on arrival"},
    {QuantizedBy::staged, "staged", "by the receiver when gathered"},
    {QuantizedBy::sender, "by_sender", "by the sender"},
    {QuantizedBy::passthrough, "passthrough", "passed on as they are"}};

/// How many tensor patterns are codes and scales, which the model does not have.
size_t derivedTensorPatterns(const schema::Manifest &manifest);

/// Counts of one endpoint.
struct QuantizedCounts {
  std::map<QuantizedBy, std::map<schema::Quantization, int64_t>> params; // instances of codes, over all places
  int64_t sends = 0; // instances of source params that are quantised to be sent
};
QuantizedCounts countQuantized(const schema::Manifest &manifest, uint32_t endpoint);

/// Of the arena of the rank that needs most, the bytes of what is gathered to be quantised, and of scales and
/// magnitudes on their way. Reads segments where elements are gathered: an error text, empty on success.
std::string peakStagedBytes(const Plan &plan, uint64_t &bytes);

} // namespace reshard::tools
