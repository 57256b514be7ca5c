// SPDX-License-Identifier: Apache-2.0
// Asserts the size of every struct of plan.fbs, and the numbers of enumerators. Neither flatc --conform nor the
// FlatBuffers verifier notices a struct that grew or whose fields moved; old records would then be misread, which gives
// wrong weights without an error. If an assertion fails, restore the struct and add a new one in a new vector
// (schema/README.md). tests/schema/structs_test.cpp compares the place of each field with recorded bytes.

#include "base/formats/quantized_formats.h"
#include "base/formats/storage_formats.h"

#include <cstddef>
#include <flatbuffers/flatbuffers.h>
#include <utility>

#include "schema/plan_generated.h"

namespace reshard::schema {

#define STRUCT(name, bytes, align)                                                                                     \
  static_assert(sizeof(name) == (bytes) && alignof(name) == (align) && std::is_trivially_copyable_v<name>)
STRUCT(IndexBlock, 48, 8);
STRUCT(PartDimension, 8, 4);
STRUCT(BufferRange, 32, 8);
STRUCT(Loop, 24, 8);
STRUCT(Shape, 16, 8);
STRUCT(Operand, 16, 8);
STRUCT(Step, 64, 8);
#undef STRUCT

// flatc --conform also accepts renamed and renumbered enumerators.
static_assert(uint8_t(DType::bf16) == 0 && uint8_t(DType::fp16) == 1 && uint8_t(DType::fp32) == 2 &&
              uint8_t(DType::fp64) == 3 && uint8_t(DType::fp8_e4m3) == 4 && uint8_t(DType::fp8_e5m2) == 5 &&
              uint8_t(DType::i8) == 6 && uint8_t(DType::i16) == 7 && uint8_t(DType::i32) == 8 &&
              uint8_t(DType::i64) == 9 && uint8_t(DType::u8) == 10 && uint8_t(DType::u16) == 11 &&
              uint8_t(DType::u32) == 12 && uint8_t(DType::u64) == 13 && uint8_t(DType::boolean) == 14);
static_assert(uint8_t(CutKind::rank_ingress) == 0 && uint8_t(CutKind::shared_nic_ingress) == 1 &&
              uint8_t(CutKind::node_ingress) == 2 && uint8_t(CutKind::node_rest_ingress) == 3 &&
              uint8_t(CutKind::rank_egress) == 4 && uint8_t(CutKind::node_egress) == 5 &&
              uint8_t(CutKind::local_copies) == 6 && uint8_t(CutKind::replica_node_ingress) == 7);
static_assert(uint8_t(ViewKind::elements) == 0 && uint8_t(ViewKind::codes) == 1 && uint8_t(ViewKind::scales) == 2 &&
              uint8_t(ViewKind::plain_scales) == 3 && uint8_t(ViewKind::amax) == 4);
static_assert(uint8_t(OverflowRule::error) == uint8_t(reshard::OverflowRule::error) &&
              uint8_t(OverflowRule::saturate) == uint8_t(reshard::OverflowRule::saturate) &&
              uint8_t(OverflowRule::infinity) == uint8_t(reshard::OverflowRule::infinity) &&
              size_t(OverflowRule::MAX) + 1 == std::size(kOverflowRuleNames));
#define STORAGE_FORMAT(format, number, ...) static_assert(uint8_t(StorageFormat::format) == number);
#include "base/formats/storage_formats.def"
static_assert(size_t(StorageFormat::MAX) + 1 == std::size(kStorageFormats));
static_assert(uint8_t(StepKind::copy) == 0 && uint8_t(StepKind::send) == 1 && uint8_t(StepKind::recv) == 2 &&
              uint8_t(StepKind::fill) == 3 && uint8_t(StepKind::reduce) == 4);

/// The name of an enumerator: __PRETTY_FUNCTION__ ends with "kValue = NAMESPACE::ENUM::NAME", then ']' or ';'.
template <auto kValue> constexpr std::string_view enumeratorName() {
  std::string_view text = __PRETTY_FUNCTION__;
  text.remove_prefix(text.find("kValue = "));
  text = text.substr(0, text.find_first_of(";]"));
  return text.substr(text.rfind(':') + 1);
}

template <class Enum, size_t... kNumbers>
constexpr bool haveNames(std::index_sequence<kNumbers...>, const char *const (&names)[sizeof...(kNumbers)]) {
  return ((enumeratorName<static_cast<Enum>(kNumbers)>() == names[kNumbers]) && ...) &&
         static_cast<size_t>(Enum::MAX) + 1 == sizeof...(kNumbers);
}

template <size_t... kNumbers> constexpr bool haveFormats(std::index_sequence<kNumbers...> numbers) {
  return haveNames<Quantization>(numbers, {kQuantizedFormats[kNumbers].name...});
}

static_assert(haveFormats(std::make_index_sequence<std::size(kQuantizedFormats)>()),
              "Quantization lists the formats of base/formats/quantized_formats.h in order");
static_assert(haveNames<ScaleLayout>(std::make_index_sequence<std::size(kScaleLayoutNames)>(), kScaleLayoutNames),
              "ScaleLayout lists the layouts of base/formats/quantized_formats.h in order");

} // namespace reshard::schema
