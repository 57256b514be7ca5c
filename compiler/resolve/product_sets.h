// SPDX-License-Identifier: Apache-2.0
// Product sets: sets of elements that are a product of sets of positions, one for each dimension.
#pragma once

#include "ir/ir.h"

#include <vector>

namespace reshard {

using ProductSet = std::vector<ir::IndexMap>; // by dimension: the identity on its positions

/// The identity on the `from` positions of an index map.
ir::IndexMap identityOn(ir::IndexMap indexMap);

bool isEmpty(const ProductSet &product);

/// Appends `whole` without `product` as disjoint product sets: the elements outside along dimension 0, then those
/// inside along dimension 0 and outside along dimension 1 …
void subtract(ProductSet whole, const ProductSet &product, std::vector<ProductSet> &rest);

/// Disjoint product sets with the same union as `products`; one set if the union is a product.
std::vector<ProductSet> makeDisjoint(const std::vector<ProductSet> &products);

} // namespace reshard
