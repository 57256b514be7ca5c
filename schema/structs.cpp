// SPDX-License-Identifier: Apache-2.0
// Asserts the layout of every struct of plan.fbs. Neither flatc --conform nor the FlatBuffers verifier notices a struct
// that grew or whose fields moved; old records would then be misread, which gives wrong weights without an error. If an
// assertion fails, restore the struct and add a new one in a new vector (schema/README.md).

#include "base/formats/quantized_formats.h"
#include "base/formats/storage_formats.h"

#include <cstddef>
#include <flatbuffers/flatbuffers.h>
#include <utility>

// flatc makes the members private, and offsetof needs access. This file contains only assertions.
#define private public
#include "schema/plan_generated.h"
#undef private

namespace reshard::schema {

#define STRUCT(name, bytes, align)                                                                                     \
  static_assert(sizeof(name) == (bytes) && alignof(name) == (align) && std::is_trivially_copyable_v<name>)
#define FIELD(name, field, offset, type)                                                                               \
  static_assert(offsetof(name, field##_) == (offset) && std::is_same_v<decltype(name::field##_), type>)

STRUCT(IndexBlock, 48, 8);
FIELD(IndexBlock, from, 0, int64_t);
FIELD(IndexBlock, to, 8, int64_t);
FIELD(IndexBlock, length, 16, int64_t);
FIELD(IndexBlock, count, 24, int64_t);
FIELD(IndexBlock, from_step, 32, int64_t);
FIELD(IndexBlock, to_step, 40, int64_t);

STRUCT(PartDimension, 8, 4);
FIELD(PartDimension, sharding, 0, uint32_t);
FIELD(PartDimension, param, 4, int32_t);

STRUCT(BufferRange, 32, 8);
FIELD(BufferRange, endpoint, 0, uint32_t);
FIELD(BufferRange, mesh_rank, 4, uint32_t);
FIELD(BufferRange, param, 8, uint32_t);
FIELD(BufferRange, first, 12, uint32_t);
FIELD(BufferRange, count, 16, uint32_t);
FIELD(BufferRange, reserved, 20, uint32_t);
FIELD(BufferRange, bytes, 24, uint64_t);

STRUCT(Loop, 24, 8);
FIELD(Loop, count, 0, uint64_t);
FIELD(Loop, stride, 8, int64_t);
FIELD(Loop, buffer_step, 16, int64_t);

STRUCT(Shape, 16, 8);
FIELD(Shape, row_bytes, 0, uint64_t);
FIELD(Shape, first_loop, 8, uint32_t);
FIELD(Shape, loop_count, 12, uint32_t);

STRUCT(Operand, 16, 8);
FIELD(Operand, offset, 0, uint64_t);
FIELD(Operand, buffer, 8, uint32_t);
FIELD(Operand, shape, 12, uint32_t);

STRUCT(Step, 64, 8);
FIELD(Step, bytes, 0, uint64_t);
FIELD(Step, staging, 8, uint64_t);
FIELD(Step, first_input, 16, uint32_t);
FIELD(Step, input_count, 20, uint32_t);
FIELD(Step, first_output, 24, uint32_t);
FIELD(Step, output_count, 28, uint32_t);
FIELD(Step, round, 32, uint32_t);
FIELD(Step, peer, 36, uint32_t);
FIELD(Step, message, 40, uint32_t);
FIELD(Step, first_after, 44, uint32_t);
FIELD(Step, after_count, 48, uint32_t);
FIELD(Step, kind, 52, uint8_t);
FIELD(Step, slot, 53, uint8_t);
FIELD(Step, level, 54, uint16_t);
FIELD(Step, chunk, 56, uint64_t);

// flatc --conform also accepts renamed and renumbered enumerators.
static_assert(uint8_t(DType::bf16) == 0 && uint8_t(DType::fp16) == 1 && uint8_t(DType::fp32) == 2 &&
              uint8_t(DType::fp64) == 3 && uint8_t(DType::fp8_e4m3) == 4 && uint8_t(DType::fp8_e5m2) == 5 &&
              uint8_t(DType::i8) == 6 && uint8_t(DType::i16) == 7 && uint8_t(DType::i32) == 8 &&
              uint8_t(DType::i64) == 9 && uint8_t(DType::u8) == 10 && uint8_t(DType::u16) == 11 &&
              uint8_t(DType::u32) == 12 && uint8_t(DType::u64) == 13 && uint8_t(DType::boolean) == 14);
static_assert(uint8_t(ViewKind::elements) == 0 && uint8_t(ViewKind::codes) == 1 && uint8_t(ViewKind::scales) == 2 &&
              uint8_t(ViewKind::plain_scales) == 3 && uint8_t(ViewKind::amax) == 4);
static_assert(uint8_t(OverflowRule::error) == uint8_t(reshard::OverflowRule::error) &&
              uint8_t(OverflowRule::saturate) == uint8_t(reshard::OverflowRule::saturate) &&
              uint8_t(OverflowRule::infinity) == uint8_t(reshard::OverflowRule::infinity) &&
              size_t(OverflowRule::MAX) + 1 == std::size(kOverflowRuleNames));
static_assert(uint8_t(StorageFormat::safetensors) == uint8_t(reshard::StorageFormat::safetensors) &&
              uint8_t(StorageFormat::dcp_safetensors) == uint8_t(reshard::StorageFormat::dcp_safetensors) &&
              uint8_t(StorageFormat::dcp) == uint8_t(reshard::StorageFormat::dcp) &&
              uint8_t(StorageFormat::megatron) == uint8_t(reshard::StorageFormat::megatron) &&
              uint8_t(StorageFormat::torch_save) == uint8_t(reshard::StorageFormat::torch_save) &&
              size_t(StorageFormat::MAX) + 1 == std::size(kStorageFormatNames));
static_assert(uint8_t(StepKind::copy) == 0 && uint8_t(StepKind::send) == 1 && uint8_t(StepKind::recv) == 2 &&
              uint8_t(StepKind::fill) == 3 && uint8_t(StepKind::convert) == 4 && uint8_t(StepKind::reduce) == 5 &&
              uint8_t(StepKind::barrier) == 6 && uint8_t(StepKind::hook) == 7);

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
