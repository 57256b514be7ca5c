// Boxes: sets of elements that are a product of positions along each dimension.
#pragma once

#include "ir/ir.h"

#include <vector>

namespace reshard {

using Box = std::vector<ir::Segments>; // positions by dimension, each related to itself

/// The `from` positions of a relation, each related to itself.
ir::Segments itself(ir::Segments segments);

bool isEmpty(const Box &box);

/// The part of `whole` that `box` leaves, appended as disjoint boxes: what is outside along dimension 0, else along
/// dimension 1 …
void subtract(Box whole, const Box &box, std::vector<Box> &rest);

/// Disjoint boxes that have the elements of these together: one where they are a product.
std::vector<Box> disjoint(const std::vector<Box> &boxes);

} // namespace reshard
