// What the compiler only warns of on request.
#pragma once

namespace reshard {

/// What is only warned of on request (--allow=NAME,…; the members are the names).
struct Allowed {
  bool axis = false;    // an axis that is not known has size 1
  bool gap = false;     // elements of a tensor that no source place holds, unless a target needs them
  bool missing = false; // a target param with a tensor that the source does not hold: it is left out
};

} // namespace reshard
