#include "schema/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace reshard::schema {

uint64_t hashOf(std::string_view text) { return XXH3_64bits(text.data(), text.size()); }

} // namespace reshard::schema
