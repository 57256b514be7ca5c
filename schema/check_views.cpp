#include "schema/check_views.h"

#include "schema/manifest.h"

#include <algorithm>

namespace reshard::schema {
namespace {

using Lengths = std::vector<int64_t>;

template <class T> size_t sizeOf(const flatbuffers::Vector<T> *vector) { return vector ? vector->size() : 0; }

int64_t blocks(int64_t length, int64_t block) { return (length + block - 1) / block; }

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

  void view(uint32_t p) {
    const Param &param = *endpoint_.params()->Get(p);
    const QuantizedView &view = *param.view();
    if (!require(view.amax_dimensions() == 0 || (view.kind() == ViewKind::amax && !target_), p,
                 "has amax dimensions, but is not a view of kind amax of a source"))
      return;
    if (!require(view.kind() <= ViewKind::MAX && view.format() <= Quantization::MAX, p,
                 "is a view of unknown kind or format") ||
        !require(view.staged() ? view.kind() != ViewKind::codes && (target_ || view.kind() != ViewKind::elements)
                               : view.kind() <= ViewKind::codes,
                 p,
                 "has a wrong `staged`, expected true for scales, plain_scales and amax, false for codes and for the "
                 "elements of a source") ||
        !require(!view.staged() || !endpoint_.storage() || view.kind() == ViewKind::amax ||
                     view.kind() == ViewKind::elements,
                 p, "is staged in storage, where only amax and elements can be") ||
        !require(view.format() != Quantization::block_fp8 || !view.swizzled(), p,
                 "has swizzled scales of block_fp8, which has no swizzled order") ||
        !require(sizeOf(param.shape()) >= (view.kind() == ViewKind::amax ? 1 : 2), p,
                 "is a view with too few dimensions, expected 1 for amax, 2 for other kinds, or more"))
      return;
    const Param *codes = base(view.codes()), *scales = base(view.scales()), *tensorScale = base(view.tensor_scale());
    for (const Param *other : {codes, scales, tensorScale})
      if (!require(other && sameInstances(param, *other), p,
                   "is a view of a param that does not exist, or has other instances"))
        return;
    // Fields that its kind does not use must have the value that the compiler writes, so that readers of a view need
    // not test its kind first.
    const bool one = view.scales() == view.codes() && view.tensor_scale() == view.codes();
    const bool usual =
        view.kind() == ViewKind::elements ? view.format() == Quantization::nvfp4 || view.tensor_scale() == view.scales()
        : view.kind() == ViewKind::codes  ? view.tensor_scale() == view.scales() && !view.swizzled()
        : view.kind() == ViewKind::amax   ? (target_ || one) && !view.swizzled()
                                          : one && view.swizzled() == (view.kind() == ViewKind::plain_scales);
    if (!require(usual, p, "is a view with params, or swizzled scales, that its kind does not use"))
      return;
    const bool wide = param.dtype() == DType::fp32 || param.dtype() == DType::bf16 || param.dtype() == DType::fp16;
    const DType code = view.format() == Quantization::nvfp4 ? DType::u8 : DType::fp8_e4m3;
    const DType scale = view.format() == Quantization::mxfp8       ? DType::u8
                        : view.format() == Quantization::block_fp8 ? DType::fp32
                                                                   : DType::fp8_e4m3;
    const bool plain = !codes->view() && !scales->view();
    switch (view.kind()) {
    case ViewKind::elements:
      require(plain && !tensorScale->view() && wide && codes->dtype() == code && scales->dtype() == scale &&
                  (view.format() != Quantization::nvfp4 || tensorScale->dtype() == DType::fp32),
              p,
              "is a view of params with wrong dtypes, expected plain params with those of its format, and elements of "
              "fp32, bf16 or fp16");
      break;
    case ViewKind::codes:
      require(!codes->view() && scales->view() && scales->view()->kind() == ViewKind::scales &&
                  scales->view()->codes() == view.codes() && scales->view()->format() == view.format() &&
                  param.dtype() == code && view.format() != Quantization::nvfp4,
              p, "is a view of codes without a view of their scales");
      require(isWide(codes->dtype()), p, "is a view of a param that is not fp32, bf16 or fp16");
      break;
    case ViewKind::scales:
      require(!codes->view() && isWide(codes->dtype()) && param.dtype() == scale &&
                  view.format() != Quantization::nvfp4,
              p, "is a view of scales of a param that has none, expected a plain param of fp32, bf16 or fp16");
      break;
    case ViewKind::plain_scales:
      require(plain && codes->dtype() == scale && param.dtype() == scale, p,
              "is a view of scales with a wrong dtype, expected that of its format");
      break;
    case ViewKind::amax: {
      const QuantizedView *other = codes->view();
      const bool written = other && other->kind() == ViewKind::elements && other->format() == Quantization::nvfp4 &&
                           other->tensor_scale() == view.scales();
      const bool read = isWide(codes->dtype()) && (!other || other->kind() == ViewKind::elements) &&
                        view.part() < sizeOf(codes->parts());
      require(param.dtype() == DType::fp32 && (target_ ? written : read), p,
              "is a view of the amax of a param that has none, or is not fp32");
      if (error_.empty() && !target_)
        part(p, *codes, *codes->parts()->Get(view.part()), sizeOf(param.shape()));
    }
    }
    for (uint32_t meshRank = 0; error_.empty() && meshRank < endpoint_.ranks()->size(); ++meshRank, work_ += 8)
      if (instanceCount(endpoint_, param, meshRank) > 0)
        require(shapes(view, target_, localShape(endpoint_, param, meshRank), localShape(endpoint_, *codes, meshRank),
                       localShape(endpoint_, *scales, meshRank), localShape(endpoint_, *tensorScale, meshRank)),
                p, "is a view whose shape does not match its base params");
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

  /// Whether the shape of a view matches those of its `codes`, `scales` and `tensor_scale`.
  bool shapes(const QuantizedView &view, bool target, const Lengths &own, const Lengths &codes, const Lengths &scales,
              const Lengths &tensorScale) const {
    const int64_t columns = view.format() == Quantization::mxfp8 ? 32 : view.format() == Quantization::nvfp4 ? 16 : 128;
    const int64_t rows = view.format() == Quantization::block_fp8 ? 128 : 1;
    auto scalesOf = [&](Lengths shape, bool swizzled) {
      if (shape.size() < 2)
        return Lengths();
      const int64_t width = blocks(shape.back(), columns), height = blocks(shape[shape.size() - 2], rows);
      shape.pop_back();
      shape.back() = height;
      if (swizzled)
        shape.back() = blocks(height, 128) * blocks(width, 4) * 512;
      else
        shape.push_back(width);
      return shape;
    };
    const bool whole = view.format() == Quantization::block_fp8;
    switch (view.kind()) {
    case ViewKind::elements: {
      Lengths code = own;
      if (view.format() == Quantization::nvfp4)
        code.back() /= 2;
      return (whole || own.back() % columns == 0) && codes == code && scales == scalesOf(own, view.swizzled()) &&
             (view.format() != Quantization::nvfp4 || tensorScale == Lengths(own.begin(), own.end() - 2));
    }
    case ViewKind::codes:
      return (whole || own.back() % columns == 0) && codes == own && scales == scalesOf(own, false);
    case ViewKind::scales:
      return !codes.empty() && (whole || codes.back() % columns == 0) && own == scalesOf(codes, false);
    case ViewKind::plain_scales: {
      Lengths swizzled(own.begin(), own.end() - 1);
      swizzled.back() = blocks(swizzled.back(), 128) * blocks(own.back(), 4) * 512;
      return codes == swizzled;
    }
    case ViewKind::amax:
      break;
    }
    if (target) // one or more numbers for each matrix
      return scales == Lengths(own.begin(), own.end() - 1);
    for (size_t d = 0; d + 1 < own.size(); ++d)
      if (own[d] != codes[baseDimensions_[d]])
        return false;
    return own.back() >= 1;
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
