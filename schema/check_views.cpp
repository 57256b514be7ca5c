// SPDX-License-Identifier: Apache-2.0
// Each kind of view has its base params, and shapes that follow from theirs. Both sides must have the same instances on
// every mesh rank.
#include "schema/checks.h"

#include "schema/flatbuffer_vectors.h"
#include "schema/manifest.h"

#include <algorithm>

namespace reshard::schema {
namespace {

using Lengths = std::vector<int64_t>;

class ViewCheck {
public:
  ViewCheck(const Endpoint &endpoint, bool target, const std::string &role, int64_t &work)
      : endpoint_(endpoint), target_(target), role_(role), work_(work) {}

  Status run() {
    for (uint32_t p = 0; p < sizeOf(endpoint_.params()) && error_.empty(); ++p) {
      const Param &param = *endpoint_.params()->Get(p);
      require(!transformed(param) || !(endpoint_.storage() || param.storage_dtype() || param.view() || param.derived()),
              p,
              "has a transform, which a param in storage, with a storage dtype, with a view, or derived cannot have");
      require(!param.derived() || (sizeOf(param.parts()) == 0 && !param.view()), p,
              "is derived, but has parts or a view");
      if (param.view() && error_.empty())
        view(p);
    }
    return error_.empty() ? Status() : badPlan(error_);
  }

private:
  bool require(bool holds, uint32_t param, const char *what) {
    if (!holds && error_.empty())
      error_ = role_ + " param '" + endpoint_.params()->Get(param)->name()->str() + "' " + what;
    return holds;
  }

  const Param *base(uint32_t number) const {
    return number < sizeOf(endpoint_.params()) ? endpoint_.params()->Get(number) : nullptr;
  }

  /// A view and its base params.
  struct Bases {
    const Param *codes, *scales, *tensorScale;
  };

  void view(uint32_t p) {
    const Param &param = *endpoint_.params()->Get(p);
    const QuantizedView &view = *param.view();
    if (!known(p) || !staging(p) ||
        !require(sizeOf(param.shape()) >= (view.kind() == ViewKind::amax ? 1 : 2), p,
                 "is a view with too few dimensions, expected 1 for amax, 2 for other kinds, or more"))
      return;
    const Bases bases{base(view.codes()), base(view.scales()), base(view.tensor_scale())};
    for (const Param *other : {bases.codes, bases.scales, bases.tensorScale})
      if (!require(other && sameInstances(param, *other), p,
                   "is a view of a param that does not exist, or has other instances"))
        return;
    if (!usual(p))
      return;
    types(p, bases);
    for (uint32_t meshRank = 0; error_.empty() && meshRank < endpoint_.ranks()->size(); ++meshRank, work_ += 8)
      if (instanceCount(endpoint_, param, meshRank) > 0)
        require(shapes(view, {localShape(endpoint_, param, meshRank), localShape(endpoint_, *bases.codes, meshRank),
                              localShape(endpoint_, *bases.scales, meshRank),
                              localShape(endpoint_, *bases.tensorScale, meshRank)}),
                p, "is a view whose shape does not match its base params");
  }

  bool known(uint32_t p) {
    const QuantizedView &view = *endpoint_.params()->Get(p)->view();
    return require(view.amax_dimensions() == 0 || (view.kind() == ViewKind::amax && !target_), p,
                   "has amax dimensions, but is not a view of kind amax of a source") &&
           require(view.kind() <= ViewKind::MAX && view.format() <= Quantization::MAX &&
                       view.scale_layout() <= ScaleLayout::MAX,
                   p, "is a view of unknown kind, format or layout of scales") &&
           require(formatOf(view).allows(scaleLayoutOf(view)), p,
                   "has a layout of scales that its format does not have");
  }

  bool staging(uint32_t p) {
    const QuantizedView &view = *endpoint_.params()->Get(p)->view();
    return require(view.staged() ? view.kind() != ViewKind::codes && (target_ || view.kind() != ViewKind::elements)
                                 : view.kind() <= ViewKind::codes,
                   p,
                   "has a wrong `staged`, expected true for scales, plain_scales and amax, false for codes and for the "
                   "elements of a source") &&
           require(view.staged() || !target_ || view.kind() != ViewKind::elements || formatOf(view).blocksInRows(), p,
                   "has blocks of several rows, but its elements are not staged") &&
           require(!view.staged() || !endpoint_.storage() || view.kind() == ViewKind::amax ||
                       view.kind() == ViewKind::elements,
                   p, "is staged in storage, where only amax and elements can be");
  }

  /// Fields that its kind does not use must have the value that the compiler writes, so that readers of a view need not
  /// test its kind first.
  bool usual(uint32_t p) {
    const QuantizedView &view = *endpoint_.params()->Get(p)->view();
    const bool one = view.scales() == view.codes() && view.tensor_scale() == view.codes(),
               plain = scaleLayoutOf(view) == reshard::ScaleLayout::plain;
    const bool usual = view.kind() == ViewKind::elements
                           ? formatOf(view).tensorScale() || view.tensor_scale() == view.scales()
                       : view.kind() == ViewKind::codes ? view.tensor_scale() == view.scales() && plain
                       : view.kind() == ViewKind::amax  ? (target_ || one) && plain
                                                        : one && plain != (view.kind() == ViewKind::plain_scales);
    return require(usual, p, "is a view with params, or a layout of scales, that its kind does not use");
  }

  void types(uint32_t p, const Bases &bases) {
    const Param &param = *endpoint_.params()->Get(p);
    const QuantizedView &view = *param.view();
    const QuantizedFormat &format = formatOf(view);
    auto isCode = [&](const Param &one) { return dtypeName(one.dtype()) == format.codeType(); };
    auto isScale = [&](const Param &one, reshard::ScaleLayout layout) {
      return dtypeName(one.dtype()) == format.scaleType(layout);
    };
    constexpr auto kPlain = reshard::ScaleLayout::plain;
    const auto &[codes, scales, tensorScale] = bases;
    const bool plain = !codes->view() && !scales->view();
    switch (view.kind()) {
    case ViewKind::elements:
      require(plain && !tensorScale->view() && isWide(param.dtype()) && isCode(*codes) &&
                  isScale(*scales, scaleLayoutOf(view)) &&
                  (!format.tensorScale() || tensorScale->dtype() == DType::fp32),
              p,
              "is a view of params with wrong dtypes, expected plain params with those of its format, and elements of "
              "fp32, bf16 or fp16");
      break;
    case ViewKind::codes:
      require(!codes->view() && scales->view() && scales->view()->kind() == ViewKind::scales &&
                  scales->view()->codes() == view.codes() && scales->view()->format() == view.format() &&
                  isCode(param) && format.sendersCanQuantize(),
              p, "is a view of codes without a view of their scales");
      require(isWide(codes->dtype()), p, "is a view of a param that is not fp32, bf16 or fp16");
      break;
    case ViewKind::scales:
      require(!codes->view() && isWide(codes->dtype()) && isScale(param, kPlain) && format.sendersCanQuantize(), p,
              "is a view of scales of a param that has none, expected a plain param of fp32, bf16 or fp16");
      break;
    case ViewKind::plain_scales:
      require(plain && isScale(*codes, scaleLayoutOf(view)) && isScale(param, kPlain), p,
              "is a view of scales with a wrong dtype, expected that of its format");
      break;
    case ViewKind::amax:
      amax(p, *codes);
    }
  }

  void amax(uint32_t p, const Param &codes) {
    const Param &param = *endpoint_.params()->Get(p);
    const QuantizedView &view = *param.view(), *other = codes.view();
    const bool written = other && other->kind() == ViewKind::elements && formatOf(*other).tensorScale() &&
                         other->tensor_scale() == view.scales();
    const bool read =
        isWide(codes.dtype()) && (!other || other->kind() == ViewKind::elements) && view.part() < sizeOf(codes.parts());
    require(param.dtype() == DType::fp32 && (target_ ? written : read), p,
            "is a view of the amax of a param that has none, or is not fp32");
    if (error_.empty() && !target_)
      part(p, codes, *codes.parts()->Get(view.part()), sizeOf(param.shape()));
  }

  /// Checks a view of the amax of one part of a source param: each dimension of the param is used once.
  void part(uint32_t view, const Param &param, const Part &part, size_t rank) {
    std::vector<bool> used(sizeOf(param.shape()));
    std::vector<bool> reduced(used.size()); // several dimensions of the tensor may share these
    baseDimensions_.clear();
    const uint32_t most = sizeOf(part.dimensions());
    const QuantizedView &amax = *endpoint_.params()->Get(view)->view();
    const char *message = "is a view of amax over dimensions that the part does not have, or that share a dimension of "
                          "the param with others";
    require(part.pattern() >= 0 && most >= (amax.amax_dimensions() == 0 ? 2 : 1) &&
                (most >= 32 || amax.amax_dimensions() >> most == 0),
            view, message);
    for (uint32_t d = 0; error_.empty() && d < most; ++d) {
      const int32_t at = part.dimensions()->Get(d)->param();
      const bool matrix = isAmaxDimension(amax, part, d);
      if (!require(at < 0 ? !matrix : !used[static_cast<size_t>(at)] || (matrix && reduced[static_cast<size_t>(at)]),
                   view, message) ||
          at < 0)
        continue;
      used[static_cast<size_t>(at)] = true;
      reduced[static_cast<size_t>(at)] = matrix;
      if (!matrix)
        baseDimensions_.push_back(static_cast<size_t>(at));
    }
    require(rank == baseDimensions_.size() + 1, view, "is a view whose shape does not match its base params");
  }

  static bool isWide(DType type) { return type == DType::fp32 || type == DType::bf16 || type == DType::fp16; }

  /// Whether two params have the same instances on every mesh rank.
  static bool sameInstances(const Param &a, const Param &b) {
    auto equal = [](const auto *x, const auto *y) {
      return sizeOf(x) == sizeOf(y) && (sizeOf(x) == 0 || std::equal(x->begin(), x->end(), y->begin()));
    };
    if (!equal(a.variables(), b.variables()) || !equal(a.instances(), b.instances()) ||
        sizeOf(a.presence()) != sizeOf(b.presence()))
      return false;
    for (uint32_t i = 0; i < sizeOf(a.presence()); ++i)
      if (a.presence()->Get(i)->axis() != b.presence()->Get(i)->axis() ||
          !equal(a.presence()->Get(i)->coordinates(), b.presence()->Get(i)->coordinates()))
        return false;
    return true;
  }

  /// The local shapes of a view and of its base params.
  struct Shapes {
    Lengths own, codes, scales, tensorScale;
  };

  bool shapes(const QuantizedView &view, const Shapes &local) const {
    const QuantizedFormat &format = formatOf(view);
    auto fits = [&](const Lengths &wide) { return !format.blocksInRows() || wide.back() % format.blockColumns == 0; };
    switch (view.kind()) {
    case ViewKind::elements: {
      Lengths rows = local.own, blocks = rows; // the shape of the codes, in one of two forms
      rows.back() /= format.codesPerNumber();
      blocks.back() /= format.blockColumns;
      blocks.push_back(format.blockColumns / format.codesPerNumber());
      const bool inBlocks = local.codes == blocks && format.codeBlocks();
      return fits(local.own) && (local.codes == rows || inBlocks) &&
             local.scales == scalesOf(format, scaleLayoutOf(view), local.own) &&
             (!format.tensorScale() || local.tensorScale == Lengths(local.own.begin(), local.own.end() - 2));
    }
    case ViewKind::codes:
      return fits(local.own) && local.codes == local.own &&
             local.scales == scalesOf(format, reshard::ScaleLayout::plain, local.own);
    case ViewKind::scales:
      return local.codes.size() >= 2 && fits(local.codes) &&
             local.own == scalesOf(format, reshard::ScaleLayout::plain, local.codes);
    case ViewKind::plain_scales: {
      if (local.codes.empty())
        return false;
      const int64_t scaleRows = local.own[local.own.size() - 2];
      const int64_t rows = matrixRows(format, scaleLayoutOf(view), scaleRows, local.codes.back());
      return format.scaleRows(rows) == scaleRows && local.codes == stored(scaleLayoutOf(view), rows, local.own);
    }
    case ViewKind::amax:
      break;
    }
    if (target_) // one or more numbers for each matrix
      return local.scales == Lengths(local.own.begin(), local.own.end() - 1);
    for (size_t d = 0; d + 1 < local.own.size(); ++d)
      if (local.own[d] != local.codes[baseDimensions_[d]])
        return false;
    return local.own.back() >= 1;
  }

  /// The shape of the scales of matrices of this shape, which has two or more dimensions.
  static Lengths scalesOf(const QuantizedFormat &format, reshard::ScaleLayout layout, Lengths shape) {
    const int64_t rows = shape[shape.size() - 2];
    shape.back() = format.scaleColumns(shape.back());
    shape[shape.size() - 2] = format.scaleRows(rows);
    return stored(layout, rows, std::move(shape));
  }

  /// The shape in a layout of scales that have this shape in the plain layout.
  static Lengths stored(reshard::ScaleLayout layout, int64_t matrixRows, Lengths shape) {
    const ScaleLengths lengths = scaleLengths(layout, matrixRows, shape[shape.size() - 2], shape.back());
    shape.resize(shape.size() - 2);
    shape.insert(shape.end(), lengths.at.begin(), lengths.at.begin() + static_cast<ptrdiff_t>(lengths.count));
    return shape;
  }

  const Endpoint &endpoint_;
  const bool target_;
  const std::string &role_;
  int64_t &work_;
  std::vector<size_t> baseDimensions_; // `amax` of a source: the dimensions of the base param that the view has
  std::string error_;
};

} // namespace

Status checkViews(const Endpoint &endpoint, bool target, const std::string &role, int64_t &work) {
  return ViewCheck(endpoint, target, role, work).run();
}

} // namespace reshard::schema
