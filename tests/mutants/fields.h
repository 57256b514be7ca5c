// SPDX-License-Identifier: Apache-2.0
// Finds every scalar, string and vector of a serialized table by reflection over the schema, and alters one in place.
#pragma once

#include <flatbuffers/reflection_generated.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace reshard::tests {

/// A field of one table or struct, or an element of a vector.
struct Slot {
  enum Kind { number, string, vector } kind;
  size_t at;    // offset of the number, or of the length of a string or vector
  size_t width; // bytes of the number, or of an element of the vector; 0: elements must not be exchanged
  bool isSigned;
};

/// Slots by "Table.field".
using Slots = std::map<std::string, std::vector<Slot>>;

class Fields {
public:
  Fields(const reflection::Schema &schema, const std::string &bytes, Slots &slots)
      : schema_(schema), bytes_(bytes), slots_(slots) {}

  /// Collects the slots of the table whose size-prefixed buffer begins at `at`.
  void root(size_t at, const char *name) {
    at += sizeof(uint32_t);
    table(at + read<uint32_t>(at), *schema_.objects()->LookupByKey(name));
  }

private:
  template <class T> T read(size_t at) const {
    T value;
    std::memcpy(&value, bytes_.data() + at, sizeof value);
    return value;
  }
  static size_t widthOf(reflection::BaseType type) {
    using enum reflection::BaseType;
    switch (type) {
    case Short:
    case UShort:
      return 2;
    case Int:
    case UInt:
    case Float:
    case String:
    case Vector:
    case Obj:
      return 4;
    case Long:
    case ULong:
    case Double:
      return 8;
    default:
      return 1;
    }
  }
  static bool isSigned(reflection::BaseType type) {
    return type == reflection::Byte || type == reflection::Short || type == reflection::Int || type == reflection::Long;
  }

  void table(size_t at, const reflection::Object &object) {
    const size_t vtable = static_cast<size_t>(static_cast<int64_t>(at) - read<int32_t>(at));
    for (const reflection::Field *field : *object.fields())
      if (field->offset() < read<uint16_t>(vtable))
        if (const uint16_t offset = read<uint16_t>(vtable + field->offset()); offset != 0)
          value(at + offset, field->type()->base_type(), field->type(), nameOf(object, *field));
  }

  void inlined(size_t at, const reflection::Object &object) {
    for (const reflection::Field *field : *object.fields())
      value(at + field->offset(), field->type()->base_type(), field->type(), nameOf(object, *field));
  }

  void value(size_t at, reflection::BaseType type, const reflection::Type *declared, const std::string &name) {
    switch (type) {
    case reflection::String:
      slots_[name].push_back({Slot::string, at + read<uint32_t>(at), 1, false});
      return;
    case reflection::Vector:
      return vector(at + read<uint32_t>(at), declared, name);
    case reflection::Obj: {
      const reflection::Object &object = *schema_.objects()->Get(static_cast<uint32_t>(declared->index()));
      return object.is_struct() ? inlined(at, object) : table(at + read<uint32_t>(at), object);
    }
    default:
      slots_[name].push_back({Slot::number, at, widthOf(type), isSigned(type)});
    }
  }

  void vector(size_t at, const reflection::Type *declared, const std::string &name) {
    const reflection::BaseType element = declared->element();
    const reflection::Object *object =
        element == reflection::Obj ? schema_.objects()->Get(static_cast<uint32_t>(declared->index())) : nullptr;
    const size_t width = object && object->is_struct() ? static_cast<size_t>(object->bytesize()) : widthOf(element);
    slots_[name + "[]"].push_back({Slot::vector, at, object && !object->is_struct() ? 0 : width,
                                   false}); // offsets to tables are relative: they cannot be exchanged
    for (uint32_t i = 0; i < read<uint32_t>(at); ++i)
      value(at + sizeof(uint32_t) + i * width, element, declared, name);
  }

  static std::string nameOf(const reflection::Object &object, const reflection::Field &field) {
    const std::string name = object.name()->str();
    return name.substr(name.rfind('.') + 1) + "." + field.name()->str();
  }

  const reflection::Schema &schema_;
  const std::string &bytes_;
  Slots &slots_;
};

/// Alters one field. Returns a description of the change.
inline std::string alter(std::string &bytes, const Slots &slots, std::mt19937_64 &random) {
  auto any = [&](uint64_t below) { return random() % below; };
  const auto &[name, list] = *std::next(slots.begin(), static_cast<long>(any(slots.size())));
  const Slot &slot = list[any(list.size())];
  auto read = [&](size_t at, size_t width, bool isSigned) {
    uint64_t value = 0;
    std::memcpy(&value, bytes.data() + at, width);
    if (isSigned && width < 8 && value >> (8 * width - 1))
      value |= ~uint64_t{0} << (8 * width);
    return static_cast<int64_t>(value);
  };
  const std::string where = name + " at " + std::to_string(slot.at) + ": ";
  if (slot.kind == Slot::number) {
    const int64_t old = read(slot.at, slot.width, slot.isSigned);
    const Slot &other = list[any(list.size())];
    const auto unsignedOld = static_cast<uint64_t>(old);
    const uint64_t same =
        static_cast<uint64_t>(read(other.at, other.width, other.isSigned)); // the same field of another table
    const uint64_t numbers[] = {0,
                                1,
                                2,
                                ~uint64_t{0},
                                unsignedOld + 1,
                                unsignedOld - 1,
                                unsignedOld + 2,
                                unsignedOld * 2,
                                unsignedOld / 2,
                                0 - unsignedOld,
                                unsignedOld ^ (uint64_t{1} << any(8 * slot.width)),
                                unsignedOld + any(64) - 32,
                                same,
                                same,
                                any(16),
                                INT32_MAX,
                                UINT32_MAX,
                                uint64_t{1} << any(63),
                                unsignedOld | (any(INT32_MAX) << 32),
                                INT64_MAX};
    const uint64_t now = numbers[any(std::size(numbers))];
    std::memcpy(bytes.data() + slot.at, &now, slot.width);
    return where + std::to_string(old) + " becomes " + std::to_string(read(slot.at, slot.width, slot.isSigned));
  }
  const auto length = static_cast<uint32_t>(read(slot.at, 4, false));
  const size_t begin = slot.at + sizeof(uint32_t);
  if (length == 0)
    return where + "empty, not altered";
  if (slot.kind == Slot::string) {
    const char letters[] = "a0{}.12le";
    const size_t i = any(length);
    bytes[begin + i] = any(3) == 0 ? letters[any(sizeof letters - 1)] : bytes[begin + any(length)];
    return where + "now '" + bytes.substr(begin, length) + "'";
  }
  if (any(2) == 0 || slot.width == 0 || length < 2) {
    const auto now = static_cast<uint32_t>(any(3) == 0 ? any(length) : length - 1);
    std::memcpy(bytes.data() + slot.at, &now, sizeof now);
    return where + std::to_string(length) + " elements become " + std::to_string(now);
  }
  const size_t a = any(length), b = any(length);
  std::swap_ranges(bytes.begin() + static_cast<long>(begin + a * slot.width),
                   bytes.begin() + static_cast<long>(begin + (a + 1) * slot.width),
                   bytes.begin() + static_cast<long>(begin + b * slot.width));
  return where + "elements " + std::to_string(a) + " and " + std::to_string(b) + " exchanged";
}

} // namespace reshard::tests
