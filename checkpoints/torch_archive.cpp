// SPDX-License-Identifier: Apache-2.0
// Computes the position of everything in the zip archive from names and lengths: local headers, padding, data, and the
// directory at the end. Numbers have 64 bits (zip64) if the archive needs them.
#include "checkpoints/torch_archive.h"

#include "checkpoints/pickle_text.h"
#include "checkpoints/torch_file.h"

namespace reshard::checkpoints {

namespace {

constexpr uint64_t kAlignment = 64, kMaxUint32 = 0xffffffff, kMaxZip32Members = 0xfffe;

/// Appends a little-endian number of at most 8 bytes.
void number(std::string &text, uint64_t value, int bytes) {
  for (int byte = 0; byte < bytes; ++byte)
    text += static_cast<char>(value >> (8 * byte));
}

/// The checksum of zip archives.
uint32_t crc32(std::string_view text) {
  uint32_t crc = ~0u;
  for (const char byte : text) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

std::vector<int64_t> stridesOf(const std::vector<int64_t> &shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;)
    strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  return strides;
}

/// A call of torch._utils._rebuild_tensor_v2, or _v3 for dtypes without a typed storage.
void addTensor(const TensorSpec &tensor, size_t key, PickleText &pickle) {
  const auto [type, storage] = torchGlobals(tensor.dtype);
  const bool typed = !storage.empty();
  pickle.global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  pickle.mark();
  pickle.mark();
  pickle.text("storage");
  if (typed)
    pickle.global("torch", storage);
  else
    pickle.global("torch.storage", "UntypedStorage");
  pickle.text(std::to_string(key));
  pickle.text("cpu");
  pickle.integer(typed ? tensor.bytes / schema::itemBytes(tensor.dtype) : tensor.bytes);
  pickle.tuple();
  pickle.persistent();
  pickle.integer(0);
  pickle.integers(tensor.shape);
  pickle.integers(stridesOf(tensor.shape));
  pickle.boolean(false);
  pickle.global("collections", "OrderedDict");
  pickle.emptyTuple();
  pickle.call();
  if (!typed)
    pickle.global("torch", type);
  pickle.tuple();
  pickle.call();
}

std::string pickleOf(const std::vector<TensorSpec> &tensors, TorchArchive::Content content) {
  PickleText pickle;
  if (content == TorchArchive::Content::tensor) {
    addTensor(tensors[0], 0, pickle);
    return pickle.finish();
  }
  pickle.emptyDictionary();
  pickle.mark();
  for (size_t i = 0; i < tensors.size(); ++i) {
    pickle.text(tensors[i].name);
    addTensor(tensors[i], i, pickle);
  }
  pickle.setItems();
  return pickle.finish();
}

struct Member {
  std::string name, text; // a tensor has no text
  uint64_t bytes = 0;
  uint64_t header = 0; // position of its local header
  uint32_t checksum = 0;
};

} // namespace

TorchArchive::TorchArchive(const std::vector<TensorSpec> &tensors, Content content) {
  std::vector<Member> members;
  const auto add = [&](const std::string &name, std::string text) {
    const uint64_t bytes = text.size();
    const uint32_t checksum = crc32(text);
    members.push_back({"archive/" + name, std::move(text), bytes, 0, checksum});
  };
  add("data.pkl", pickleOf(tensors, content));
  add("byteorder", "little");
  const size_t first = members.size();
  for (size_t i = 0; i < tensors.size(); ++i)
    members.push_back({"archive/data/" + std::to_string(i), {}, static_cast<uint64_t>(tensors[i].bytes), 0, 0});
  const size_t last = members.size();
  add("version", "3\n");
  uint64_t most = 1 << 20;
  for (const Member &member : members)
    most += member.bytes + 2 * member.name.size() + 256;
  const bool large = most > kMaxUint32 || members.size() > kMaxZip32Members; // then numbers have 64 bits (zip64)

  for (size_t i = 0; i < members.size(); ++i) {
    Member &member = members[i];
    member.header = bytes_;
    std::string header = "PK\x03\x04";
    number(header, large ? 45 : 20, 2);
    header.append(2 + 2 + 2, 0); // flags, method: stored, time
    number(header, 0x21, 2);     // 1 January 1980
    number(header, member.checksum, 4);
    number(header, large ? kMaxUint32 : member.bytes, 4);
    number(header, large ? kMaxUint32 : member.bytes, 4);
    number(header, member.name.size(), 2);
    std::string extra;
    if (large) {
      number(extra, 1, 2);
      number(extra, 16, 2);
      number(extra, member.bytes, 8);
      number(extra, member.bytes, 8);
    }
    const uint64_t at = bytes_ + header.size() + 2 + member.name.size() + extra.size() + 4;
    const uint64_t padding = (kAlignment - at % kAlignment) % kAlignment;
    number(extra, 0x4246, 2); // the padding of PyTorch's own archives
    number(extra, padding, 2);
    extra.append(padding, 'Z');
    number(header, extra.size(), 2);
    header += member.name + extra + member.text;
    bytes_ += header.size();
    texts_.emplace_back(member.header, std::move(header));
    if (i >= first && i < last)
      bytes_ += member.bytes;
  }
  const uint64_t directory = bytes_;
  std::string tail;
  for (const Member &member : members) {
    tail += "PK\x01\x02";
    number(tail, large ? 45 : 20, 2);
    number(tail, large ? 45 : 20, 2);
    tail.append(2 + 2 + 2, 0); // flags, method, time
    number(tail, 0x21, 2);
    number(tail, member.checksum, 4);
    number(tail, large ? kMaxUint32 : member.bytes, 4);
    number(tail, large ? kMaxUint32 : member.bytes, 4);
    number(tail, member.name.size(), 2);
    number(tail, large ? 28 : 0, 2);
    tail.append(2 + 2 + 2 + 4, 0); // comment, disk, attributes
    number(tail, large ? kMaxUint32 : member.header, 4);
    tail += member.name;
    if (large) {
      number(tail, 1, 2);
      number(tail, 24, 2);
      number(tail, member.bytes, 8);
      number(tail, member.bytes, 8);
      number(tail, member.header, 8);
    }
  }
  const uint64_t directoryBytes = tail.size();
  if (large) {
    const uint64_t end = directory + directoryBytes;
    tail += "PK\x06\x06";
    number(tail, 44, 8);
    number(tail, 45, 2);
    number(tail, 45, 2);
    number(tail, 0, 8);
    number(tail, members.size(), 8);
    number(tail, members.size(), 8);
    number(tail, directoryBytes, 8);
    number(tail, directory, 8);
    tail += "PK\x06\x07";
    number(tail, 0, 4);
    number(tail, end, 8);
    number(tail, 1, 4);
  }
  const uint64_t count = large ? 0xffff : members.size();
  tail += "PK\x05\x06";
  number(tail, 0, 4);
  number(tail, count, 2);
  number(tail, count, 2);
  number(tail, large ? kMaxUint32 : directoryBytes, 4);
  number(tail, large ? kMaxUint32 : directory, 4);
  number(tail, 0, 2);
  bytes_ += tail.size();
  texts_.emplace_back(directory, std::move(tail));
}

void TorchArchive::addTo(std::vector<MappedFile::Part> &parts, uint64_t begin) const {
  for (const auto &[position, text] : texts_)
    parts.push_back({begin + position, text});
}

Status createTorchFile(const std::string &path, const std::vector<TensorSpec> &tensors) {
  const TorchArchive archive(tensors, TorchArchive::Content::dictionary);
  std::vector<MappedFile::Part> parts;
  archive.addTo(parts, 0);
  return MappedFile::create(path, archive.bytes(), parts).status();
}

} // namespace reshard::checkpoints
