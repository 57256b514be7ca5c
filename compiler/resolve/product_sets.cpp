// SPDX-License-Identifier: Apache-2.0
#include "compiler/resolve/product_sets.h"

#include <algorithm>

namespace reshard {

using ir::IndexBlock;
using ir::IndexMap;

IndexMap identityOn(IndexMap indexMap) {
  for (IndexBlock &s : indexMap) {
    s.to = s.from;
    s.toStep = s.fromStep;
  }
  return ir::normalize(std::move(indexMap));
}

bool isEmpty(const ProductSet &product) {
  return std::any_of(product.begin(), product.end(), [](const IndexMap &each) { return each.empty(); });
}

void subtract(ProductSet whole, const ProductSet &product, std::vector<ProductSet> &rest) {
  for (size_t d = 0; d < whole.size(); ++d)
    if (disjointFrom(whole[d], product[d])) {
      rest.push_back(std::move(whole));
      return;
    }
  for (size_t d = 0; d < whole.size(); ++d) {
    if (sameFrom(whole[d], product[d]))
      continue;
    ProductSet outside = whole;
    outside[d] = difference(whole[d], product[d]);
    if (!outside[d].empty())
      rest.push_back(std::move(outside));
    whole[d] = restrict(whole[d], product[d]);
  }
}

namespace {

/// `wholes` without `product`.
std::vector<ProductSet> remaining(std::vector<ProductSet> wholes, const ProductSet &product) {
  std::vector<ProductSet> rest;
  for (ProductSet &whole : wholes)
    subtract(std::move(whole), product, rest);
  return rest;
}

} // namespace

std::vector<ProductSet> makeDisjoint(const std::vector<ProductSet> &products) {
  if (products.empty())
    return {};
  ProductSet hull = products[0];
  for (const ProductSet &product : products)
    for (size_t d = 0; d < hull.size(); ++d)
      if (const IndexMap added = difference(product[d], hull[d]); !added.empty()) {
        hull[d].insert(hull[d].end(), added.begin(), added.end());
        hull[d] = ir::normalize(std::move(hull[d]));
      }
  std::vector<ProductSet> missing = {hull};
  for (size_t i = 0; i < products.size() && !missing.empty(); ++i)
    missing = remaining(std::move(missing), products[i]);
  if (missing.empty())
    return {hull};
  std::vector<ProductSet> result;
  for (const ProductSet &product : products) {
    std::vector<ProductSet> own = {product};
    for (size_t i = 0; i < result.size() && !own.empty(); ++i)
      own = remaining(std::move(own), result[i]);
    result.insert(result.end(), own.begin(), own.end());
  }
  return result;
}

} // namespace reshard
