#include "compiler/boxes.h"

#include <algorithm>

namespace reshard {

using ir::Segment;
using ir::Segments;

Segments itself(Segments segments) {
  for (Segment &s : segments) {
    s.to = s.from;
    s.toStep = s.fromStep;
  }
  return ir::normalize(std::move(segments));
}

bool isEmpty(const Box &box) {
  return std::any_of(box.begin(), box.end(), [](const Segments &each) { return each.empty(); });
}

void subtract(Box whole, const Box &box, std::vector<Box> &rest) {
  for (size_t d = 0; d < whole.size(); ++d)
    if (disjointFrom(whole[d], box[d])) {
      rest.push_back(std::move(whole));
      return;
    }
  for (size_t d = 0; d < whole.size(); ++d) {
    if (sameFrom(whole[d], box[d]))
      continue;
    Box outside = whole;
    outside[d] = difference(whole[d], box[d]);
    if (!outside[d].empty())
      rest.push_back(std::move(outside));
    whole[d] = restrict(whole[d], box[d]);
  }
}

namespace {

/// What `box` leaves of all of `wholes`.
std::vector<Box> left(std::vector<Box> wholes, const Box &box) {
  std::vector<Box> rest;
  for (Box &whole : wholes)
    subtract(std::move(whole), box, rest);
  return rest;
}

} // namespace

std::vector<Box> disjoint(const std::vector<Box> &boxes) {
  if (boxes.empty())
    return {};
  Box hull = boxes[0];
  for (const Box &box : boxes)
    for (size_t d = 0; d < hull.size(); ++d)
      if (const Segments more = difference(box[d], hull[d]); !more.empty()) {
        hull[d].insert(hull[d].end(), more.begin(), more.end());
        hull[d] = ir::normalize(std::move(hull[d]));
      }
  std::vector<Box> missing = {hull};
  for (size_t i = 0; i < boxes.size() && !missing.empty(); ++i)
    missing = left(std::move(missing), boxes[i]);
  if (missing.empty())
    return {hull};
  std::vector<Box> result;
  for (const Box &box : boxes) {
    std::vector<Box> own = {box};
    for (size_t i = 0; i < result.size() && !own.empty(); ++i)
      own = left(std::move(own), result[i]);
    result.insert(result.end(), own.begin(), own.end());
  }
  return result;
}

} // namespace reshard
