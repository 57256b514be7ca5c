#include "schema/check_faces.h"

#include "schema/manifest.h"

#include <algorithm>

namespace reshard::schema {
namespace {

using Lengths = std::vector<int64_t>;

template <class T> size_t sizeOf(const flatbuffers::Vector<T> *vector) { return vector ? vector->size() : 0; }

int64_t blocks(int64_t length, int64_t block) { return (length + block - 1) / block; }

class FaceCheck {
public:
  FaceCheck(const Endpoint &endpoint, bool target, const std::string &role, int64_t &work)
      : endpoint_(endpoint), target_(target), role_(role), work_(work) {}

  std::string run() {
    for (uint32_t p = 0; p < sizeOf(endpoint_.params()) && error_.empty(); ++p) {
      const Param &param = *endpoint_.params()->Get(p);
      require(!transformed(param) || !(endpoint_.storage() || param.stored() || param.face() || param.made()), p,
              "has a transform where none may be");
      require(!param.made() || (sizeOf(param.parts()) == 0 && !param.face()), p,
              "is made of others, but a face or with parts");
      if (param.face() && error_.empty())
        face(p);
    }
    return error_;
  }

private:
  bool require(bool holds, uint32_t param, const char *what) {
    if (!holds && error_.empty())
      error_ = role_ + " param '" + endpoint_.params()->Get(param)->name()->str() + "' " + what;
    return holds;
  }

  const Param *shown(uint32_t number) const {
    return number < sizeOf(endpoint_.params()) ? endpoint_.params()->Get(number) : nullptr;
  }

  void face(uint32_t p) {
    const Param &param = *endpoint_.params()->Get(p);
    const Face &face = *param.face();
    if (!require(face.over() == 0 || (face.kind() == FaceKind::amax && !target_), p,
                 "is over dimensions of what it does not show"))
      return;
    if (!require(face.kind() <= FaceKind::MAX && face.format() <= Quantization::MAX, p, "shows something unknown") ||
        !require(face.gathered() ? face.kind() != FaceKind::codes && (target_ || face.kind() != FaceKind::elements)
                                 : face.kind() <= FaceKind::codes,
                 p, "is gathered where it may not be, or not where it must be") ||
        !require(!face.gathered() || !endpoint_.storage() || face.kind() == FaceKind::amax ||
                     face.kind() == FaceKind::elements,
                 p, "is gathered in files") ||
        !require(face.format() != Quantization::block_fp8 || !face.swizzled(), p, "swizzles scales of block_fp8") ||
        !require(sizeOf(param.shape()) >= (face.kind() == FaceKind::amax ? 1 : 2), p, "is no matrix"))
      return;
    const Param *codes = shown(face.codes()), *scales = shown(face.scales()), *tensorScale = shown(face.tensor_scale());
    for (const Param *other : {codes, scales, tensorScale})
      if (!require(other && like(param, *other), p, "shows a param that is not there wherever it is"))
        return;
    // Fields that its kind has no use for are as the compiler writes them: what reads a face need not look at its kind
    // first.
    const bool one = face.scales() == face.codes() && face.tensor_scale() == face.codes();
    const bool usual =
        face.kind() == FaceKind::elements ? face.format() == Quantization::nvfp4 || face.tensor_scale() == face.scales()
        : face.kind() == FaceKind::codes  ? face.tensor_scale() == face.scales() && !face.swizzled()
        : face.kind() == FaceKind::amax   ? (target_ || one) && !face.swizzled()
                                          : one && face.swizzled() == (face.kind() == FaceKind::plain_scales);
    if (!require(usual, p, "names params, or swizzled scales, that its kind does not show"))
      return;
    const bool wide = param.dtype() == DType::fp32 || param.dtype() == DType::bf16 || param.dtype() == DType::fp16;
    const DType code = face.format() == Quantization::nvfp4 ? DType::u8 : DType::fp8_e4m3;
    const DType scale = face.format() == Quantization::mxfp8       ? DType::u8
                        : face.format() == Quantization::block_fp8 ? DType::fp32
                                                                   : DType::fp8_e4m3;
    const bool plain = !codes->face() && !scales->face();
    switch (face.kind()) {
    case FaceKind::elements:
      require(plain && !tensorScale->face() && wide && codes->dtype() == code && scales->dtype() == scale &&
                  (face.format() != Quantization::nvfp4 || tensorScale->dtype() == DType::fp32),
              p, "shows params of other dtypes than its format has");
      break;
    case FaceKind::codes:
      require(!codes->face() && scales->face() && scales->face()->kind() == FaceKind::scales &&
                  scales->face()->codes() == face.codes() && scales->face()->format() == face.format() &&
                  param.dtype() == code && face.format() != Quantization::nvfp4,
              p, "shows codes without their scales");
      require(isWide(codes->dtype()), p, "shows a param that is not fp32, bf16 or fp16");
      break;
    case FaceKind::scales:
      require(!codes->face() && isWide(codes->dtype()) && param.dtype() == scale &&
                  face.format() != Quantization::nvfp4,
              p, "shows scales of a param that has none");
      break;
    case FaceKind::plain_scales:
      require(plain && codes->dtype() == scale && param.dtype() == scale, p, "shows scales of another dtype");
      break;
    case FaceKind::amax: {
      const Face *other = codes->face();
      const bool made = other && other->kind() == FaceKind::elements && other->format() == Quantization::nvfp4 &&
                        other->tensor_scale() == face.scales();
      const bool read = isWide(codes->dtype()) && (!other || other->kind() == FaceKind::elements) &&
                        face.part() < sizeOf(codes->parts());
      require(param.dtype() == DType::fp32 && (target_ ? made : read), p,
              "shows the largest magnitudes of what has none");
      if (error_.empty() && !target_)
        part(p, *codes, *codes->parts()->Get(face.part()), sizeOf(param.shape()));
    }
    }
    for (uint32_t place = 0; error_.empty() && place < endpoint_.ranks()->size(); ++place, work_ += 8)
      if (instanceCount(endpoint_, param, place) > 0)
        require(shapes(face, target_, localShape(endpoint_, param, place), localShape(endpoint_, *codes, place),
                       localShape(endpoint_, *scales, place), localShape(endpoint_, *tensorScale, place)),
                p, "has another shape than what it shows");
  }

  /// Of a source param whose largest magnitudes are shown: each dimension once.
  void part(uint32_t face, const Param &param, const Part &part, size_t rank) {
    std::vector<bool> used(sizeOf(param.shape()));
    std::vector<bool> over(used.size()); // those that several dimensions of the tensor may share
    shown_.clear();
    const uint32_t most = sizeOf(part.dimensions());
    const Face &shows = *endpoint_.params()->Get(face)->face();
    require(part.family() >= 0 && most >= (shows.over() == 0 ? 2 : 1) && (most >= 32 || shows.over() >> most == 0),
            face, "shows the largest magnitudes of what is no matrix");
    for (uint32_t d = 0; error_.empty() && d < most; ++d) {
      const int32_t at = part.dimensions()->Get(d)->param();
      const bool matrix = isOver(shows, part, d);
      if (!require(at < 0 ? !matrix : !used[static_cast<size_t>(at)] || (matrix && over[static_cast<size_t>(at)]), face,
                   "shows the largest magnitudes of what is no matrix") ||
          at < 0)
        continue;
      used[static_cast<size_t>(at)] = true;
      over[static_cast<size_t>(at)] = matrix;
      if (!matrix)
        shown_.push_back(static_cast<size_t>(at));
    }
    require(rank == shown_.size() + 1, face, "has another shape than what it shows");
  }

  static bool isWide(DType type) { return type == DType::fp32 || type == DType::bf16 || type == DType::fp16; }

  /// Whether two params have the same instances on every place.
  static bool like(const Param &a, const Param &b) {
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

  /// Of the face itself, and of what it names `codes`, `scales` and `tensor_scale`.
  bool shapes(const Face &face, bool target, const Lengths &own, const Lengths &codes, const Lengths &scales,
              const Lengths &tensorScale) const {
    const int64_t columns = face.format() == Quantization::mxfp8 ? 32 : face.format() == Quantization::nvfp4 ? 16 : 128;
    const int64_t rows = face.format() == Quantization::block_fp8 ? 128 : 1;
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
    const bool whole = face.format() == Quantization::block_fp8;
    switch (face.kind()) {
    case FaceKind::elements: {
      Lengths code = own;
      if (face.format() == Quantization::nvfp4)
        code.back() /= 2;
      return (whole || own.back() % columns == 0) && codes == code && scales == scalesOf(own, face.swizzled()) &&
             (face.format() != Quantization::nvfp4 || tensorScale == Lengths(own.begin(), own.end() - 2));
    }
    case FaceKind::codes:
      return (whole || own.back() % columns == 0) && codes == own && scales == scalesOf(own, false);
    case FaceKind::scales:
      return !codes.empty() && (whole || codes.back() % columns == 0) && own == scalesOf(codes, false);
    case FaceKind::plain_scales: {
      Lengths swizzled(own.begin(), own.end() - 1);
      swizzled.back() = blocks(swizzled.back(), 128) * blocks(own.back(), 4) * 512;
      return codes == swizzled;
    }
    case FaceKind::amax:
      break;
    }
    if (target) // numbers of each matrix
      return scales == Lengths(own.begin(), own.end() - 1);
    for (size_t d = 0; d + 1 < own.size(); ++d)
      if (own[d] != codes[shown_[d]])
        return false;
    return own.back() >= 1;
  }

  const Endpoint &endpoint_;
  const bool target_;
  const std::string &role_;
  int64_t &work_;
  std::vector<size_t> shown_; // of `amax` of a source: its dimensions, of the param
  std::string error_;
};

} // namespace

std::string checkFaces(const Endpoint &endpoint, bool target, const std::string &role, int64_t &work) {
  return FaceCheck(endpoint, target, role, work).run();
}

} // namespace reshard::schema
