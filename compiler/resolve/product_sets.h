// Boxes: sets of elements that are a product of positions along each dimension.
#pragma once

#include "ir/ir.h"

#include <vector>

namespace reshard {

using ProductSet = std::vector<ir::IndexMap>; // positions by dimension, each related to itself

/// The `from` positions of a relation, each related to itself.
ir::IndexMap identityOn(ir::IndexMap indexMap);

bool isEmpty(const ProductSet &product);

/// The part of `whole` that `box` leaves, appended as disjoint boxes: what is outside along dimension 0, else along
/// dimension 1 …
void subtract(ProductSet whole, const ProductSet &product, std::vector<ProductSet> &rest);

/// Disjoint boxes that have the elements of these together: one where they are a product.
std::vector<ProductSet> makeDisjoint(const std::vector<ProductSet> &products);

} // namespace reshard
