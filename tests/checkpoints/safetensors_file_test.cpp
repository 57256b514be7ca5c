// SPDX-License-Identifier: Apache-2.0
// safetensors files: written files can be read, and invalid files are refused with a message that names the file and
// the tensor.

#include "checkpoints/stored_format.h"
#include "tests/lib/folder.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sys/resource.h>
#include <unistd.h>

using namespace reshard::checkpoints;
using reshard::Status;
using reshard::schema::DType;
namespace fs = std::filesystem;

namespace {

class Safetensors : public testing::Test {
protected:
  std::string path(const std::string &name) const { return folder_ / name; }
  void put(const std::string &name, const std::string &bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  /// A file with a correct header length, a header and data.
  static std::string file(const std::string &header, size_t dataBytes) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char *>(&length), 8) + header + std::string(dataBytes, 'x');
  }
  /// The error for a file, without its folder.
  std::string refusal(const std::string &bytes) const {
    put("f.safetensors", bytes);
    Checkpoint checkpoint;
    return shorten(readSafetensors(path("f.safetensors"), checkpoint).message());
  }
  std::string shorten(std::string text) const {
    const std::string prefix = folder_.path() + "/";
    for (size_t at = text.find(prefix); at != std::string::npos; at = text.find(prefix))
      text.erase(at, prefix.size());
    return text;
  }

  const reshard::tests::TemporaryFolder folder_;
};

const std::string kGood =
    R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BOOL","shape":[3],"data_offsets":[24,27]}})";

TEST_F(Safetensors, ReadsWhatTheFormatAllows) {
  // Metadata, a scalar, an empty tensor, both fp8 types, a padded header, data in another order than the header.
  put("f.safetensors",
      file(
          R"({"__metadata__":{"format":"pt"},"z":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[4,6]},)"
          R"("scalar":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"empty":{"dtype":"BF16","shape":[0,8],"data_offsets":[4,4]},)"
          R"("w":{"dtype":"F8_E5M2","shape":[1],"data_offsets":[6,7]}}   )",
          7));
  Checkpoint checkpoint;
  ASSERT_EQ(readSafetensors(path("f.safetensors"), checkpoint).message(), "");
  ASSERT_EQ(checkpoint.tensors.size(), 4u);
  EXPECT_EQ(checkpoint.tensors["scalar"].bytes, 4);
  EXPECT_TRUE(checkpoint.tensors["scalar"].shape.empty());
  EXPECT_EQ(checkpoint.tensors["empty"].bytes, 0);
  EXPECT_EQ(checkpoint.tensors["z"].dtype, DType::fp8_e4m3);
  EXPECT_EQ(checkpoint.tensors["w"].dtype, DType::fp8_e5m2);
  EXPECT_EQ(checkpoint.tensors["w"].data - checkpoint.tensors["scalar"].data, 6);
}

std::string many(const std::string &text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i)
    all += text;
  return all;
}

TEST_F(Safetensors, RefusesEachDamage) {
  const std::string file24 = "'f.safetensors': ";
  const struct {
    std::string bytes, message;
  } cases[] = {
      {"", "truncated: found 0 bytes, a safetensors file has at least 8"},
      {"1234567", "truncated: found 7 bytes, a safetensors file has at least 8"},
      {std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8) + "{}",
       "truncated or damaged: the header should have 18446744073709551615 bytes, but the file has 10"},
      {file("{}", 0).substr(0, 9), "truncated or damaged: the header should have 2 bytes, but the file has 9"},
      {file("[]", 0), "damaged header: not a JSON object"},
      {file("{", 0), "damaged header: not a JSON object"},
      {file("{\"\xff\":1}", 0), "damaged header: not a JSON object"},
      {file(
           R"({"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":1}}}}}}}}}}}}}}}}})",
           0),
       "damaged header: not a JSON object"},
      {file(
           R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
           8),
       "damaged header: the key 'a' is repeated"},
      {file(R"({"a":7})", 0), "tensor 'a': expected dtype, shape and data_offsets"},
      {file(R"({"a":{"dtype":"F32","shape":[1]}})", 4), "tensor 'a': expected dtype, shape and data_offsets"},
      {file(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4),
       "tensor 'a': expected dtype, shape and data_offsets"},
      {file(R"({"a":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}})", 8), "tensor 'a': unknown dtype 'C64'"},
      {file(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4),
       "tensor 'a': a length in its shape is not an unsigned integer, or is too large"},
      {file(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4),
       "tensor 'a': a length in its shape is not an unsigned integer, or is too large"},
      {file(R"({"a":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]}})", 4),
       "tensor 'a': a length in its shape is not an unsigned integer, or is too large"},
      {file(R"({"a":{"dtype":"F32","shape":[1073741824,1073741824,16],"data_offsets":[0,4]}})", 4),
       "tensor 'a': its shape is too large"},
      {file(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}})", 4),
       "tensor 'a': its data_offsets are not unsigned integers"},
      {file(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", 4),
       "tensor 'a': its data_offsets lie outside the file"},
      {file(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4),
       "tensor 'a': its data_offsets lie outside the file"},
      {file(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4),
       "tensor 'a': its shape and dtype need 8 bytes, but its data_offsets span 4"},
      {file(
           R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
           4),
       "damaged header: the data has a gap or an overlap at byte 0"},
      {file(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8),
       "damaged header: the data has a gap or an overlap at byte 0"},
      {file(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 5),
       "damaged: the file has 5 bytes of data, but its tensors have 4"},
      {file(kGood, 26), "tensor 'b': its data_offsets lie outside the file"},
      {file(R"({"a":{"dtype":"F32","data_offsets":[0,4],"shape":[1)" + many(",1", 64) + "]}}", 4),
       "tensor 'a': its shape has more than 64 dimensions"},
      {file(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4)" + many(",0", 64) + "]}}", 4),
       "tensor 'a': expected dtype, shape and data_offsets"},
      {file(R"({"__metadata__":7})", 0), "tensor '__metadata__': expected dtype, shape and data_offsets"},
  };
  for (const auto &[bytes, message] : cases)
    EXPECT_EQ(refusal(bytes), file24 + message);
}

TEST_F(Safetensors, RefusesAHeaderOverTheLimit) {
  // A header of the largest allowed length, and one that is a byte longer. The files are sparse and use no disk space.
  for (const auto &[length, message] :
       {std::pair<uint64_t, std::string>{100'000'001, "the header should have 100000001 bytes"},
        {100'000'000, "not a JSON object"}}) {
    put("f.safetensors", std::string(reinterpret_cast<const char *>(&length), 8));
    fs::resize_file(path("f.safetensors"), 8 + length);
    Checkpoint checkpoint;
    EXPECT_NE(readSafetensors(path("f.safetensors"), checkpoint).message().find(message), std::string::npos) << length;
  }
}

TEST_F(Safetensors, RefusesDeepNestingInBoundedTime) {
  EXPECT_NE(refusal(file("{\"a\":" + std::string(2'000'000, '['), 0)), "");
  EXPECT_NE(refusal(file("{\"a\":" + std::string(1'000'000, '[') + std::string(1'000'000, ']') + "}", 0)), "");
}

TEST_F(Safetensors, EveryTruncationAndEveryFlippedBitOfTheHeaderIsSafe) {
  const std::string good = file(kGood, 27);
  ASSERT_EQ(refusal(good), "");
  for (size_t length = 0; length < good.size(); ++length)
    EXPECT_NE(refusal(good.substr(0, length)), "") << length;
  for (size_t at = 0; at < 8 + kGood.size(); ++at)
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      refusal(bad); // a flipped bit in a name leaves a valid file; reading must not crash
    }
}

TEST_F(Safetensors, MissingFilesAndFoldersAreNamed) {
  Checkpoint checkpoint;
  EXPECT_EQ(shorten(readSafetensors(path("none.safetensors"), checkpoint).message()),
            "cannot open 'none.safetensors': No such file or directory");
  EXPECT_EQ(shorten(readSafetensors(folder_.path(), checkpoint).message()),
            "'" + folder_.path() + "' is not a regular file");
}

TEST_F(Safetensors, WritesAlignedAndReadsBack) {
  const std::vector<TensorSpec> specs = {{"odd", DType::boolean, {3}, 3},    {"wide", DType::fp64, {2}, 16},
                                         {"scalar", DType::fp32, {}, 4},     {"half", DType::bf16, {1, 3}, 6},
                                         {"eight", DType::fp8_e4m3, {5}, 5}, {"empty", DType::fp32, {0}, 0}};
  ASSERT_EQ(createSafetensors(path("f.safetensors"), specs).message(), "");
  {
    Checkpoint made;
    ASSERT_EQ(readSafetensors(path("f.safetensors"), made, true).message(), "");
    for (const TensorSpec &spec : specs)
      std::memset(made.tensors[spec.name].data, spec.name[0], static_cast<size_t>(spec.bytes));
  }
  Checkpoint found;
  ASSERT_EQ(readSafetensors(path("f.safetensors"), found).message(), "");
  ASSERT_EQ(found.tensors.size(), specs.size());
  for (const TensorSpec &spec : specs) {
    const TensorView &view = found.tensors[spec.name];
    EXPECT_EQ(view.dtype, spec.dtype);
    EXPECT_EQ(view.shape, spec.shape);
    EXPECT_EQ(view.bytes, spec.bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % static_cast<size_t>(reshard::schema::itemBytes(spec.dtype)), 0u)
        << spec.name;
    for (int64_t i = 0; i < spec.bytes; ++i)
      EXPECT_EQ(static_cast<char>(view.data[i]), spec.name[0]);
  }
  uint64_t header = 0;
  std::ifstream(path("f.safetensors"), std::ios::binary).read(reinterpret_cast<char *>(&header), 8);
  EXPECT_EQ(header % 8, 0u);
  EXPECT_EQ(shorten(createSafetensors(path("f.safetensors"), specs).message()),
            "cannot create 'f.safetensors': File exists");
}

TEST_F(Safetensors, CheckpointsAreSplitIntoFiles) {
  const std::vector<ChunkedTensor> tensors = {{"a", DType::fp32, {4}, {{{0}, {4}}}},
                                              {"b", DType::fp32, {4}, {{{0}, {4}}}},
                                              {"c", DType::fp32, {10}, {{{0}, {10}}}},
                                              {"d", DType::fp32, {1}, {{{0}, {1}}}}};
  fs::create_directory(path("one"));
  fs::create_directory(path("many"));
  for (const auto &[name, limit, files] :
       {std::tuple{"one", 1000, 1}, {"many", 32, 4}}) { // 16 + 16 | 40 | 4 and the index
    Checkpoint found;
    ASSERT_EQ(formats::safetensors.create(path(name), {tensors, {}, limit}).message(), "");
    EXPECT_EQ(std::distance(fs::directory_iterator(path(name)), {}), files);
    ASSERT_EQ(readCheckpoint(path(name), found).message(), "");
    EXPECT_EQ(found.tensors.size(), 4u);
  }
  EXPECT_TRUE(fs::exists(path("one/model.safetensors")));
  EXPECT_TRUE(fs::exists(path("many/model-00002-of-00003.safetensors")));
}

/// CPU time of this thread in user mode.
double cpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec) + 1e-6 * static_cast<double>(usage.ru_utime.tv_usec);
}

/// CPU seconds to write a checkpoint of that many names in 4 files with an index, to read it, and to read one file.
std::array<double, 3> secondsOf(int names, const std::string &folder) {
  std::vector<ChunkedTensor> tensors;
  tensors.reserve(static_cast<size_t>(names));
  for (int i = 0; i < names; ++i)
    tensors.push_back(
        {"model.layers." + std::to_string(i / 1000) + ".mlp.experts." + std::to_string(i % 1000) + ".up_proj.weight",
         DType::u8,
         {1},
         {{{0}, {1}}}});
  const auto measured = [](auto work) {
    const double begin = cpuSeconds();
    const Status status = work();
    const double seconds = cpuSeconds() - begin;
    EXPECT_EQ(status.message(), "");
    return seconds;
  };
  Checkpoint found, one;
  const double written = measured([&] { return formats::safetensors.create(folder, {tensors, {}, names / 4}); });
  const double read = measured([&] { return readCheckpoint(folder, found); });
  EXPECT_EQ(found.tensors.size(), tensors.size());
  const std::string alone = folder + "/one";
  fs::create_directory(alone);
  EXPECT_EQ(createSafetensors(alone + "/model.safetensors", NewCheckpoint{tensors, {}, names}.chunks()).message(), "");
  return {written, read, measured([&] { return readCheckpoint(alone, one); })};
}

TEST_F(Safetensors, ManyNamesTakeTimeInProportion) {
  // A linear search for each of 200,000 names would take minutes. The comparison with fewer names holds for slow
  // builds and busy machines, too: 8 times as many names take about 8 times as long; with a search for each, 64 times.
  constexpr int kTimes = 8, kNames = 200'000;
  fs::create_directory(path("few"));
  fs::create_directory(path("many"));
  const std::array<double, 3> few = secondsOf(kNames / kTimes, path("few")), many = secondsOf(kNames, path("many"));
  for (size_t i = 0; i < few.size(); ++i)
    EXPECT_LT(many[i], 3 * kTimes * few[i] + 0.1) << "time " << i << ": " << few[i] << " s for an eighth";
}

TEST_F(Safetensors, AnIndexMustAgreeWithItsFiles) {
  put("x.safetensors", file(kGood, 27));
  auto index = [&](const std::string &text) {
    put("model.safetensors.index.json", text);
    Checkpoint checkpoint;
    return shorten(readCheckpoint(folder_.path(), checkpoint).message());
  };
  EXPECT_EQ(index(R"({"metadata":{"total_size":27},"weight_map":{"a":"x.safetensors","b":"x.safetensors"}})"), "");
  EXPECT_EQ(
      index(R"({"weight_map":{"a":"x.safetensors"}})"),
      "'x.safetensors' has 2 tensors, but the index lists 1 there; the index lacks 'b': expected an index and files "
      "of one checkpoint");
  EXPECT_EQ(index(R"({"weight_map":{"a":"x.safetensors","c":"x.safetensors"}})"),
            "'x.safetensors' has 2 tensors, but the index lists 2 there; the file lacks 'c'; the index lacks 'b': "
            "expected an index and files of one checkpoint");
  EXPECT_EQ(index(R"({"weight_map":{"a":"y.safetensors"}})"), "cannot open 'y.safetensors': No such file or directory");
  EXPECT_EQ(index(R"({"weight_map":{"a":"x.safetensors","a":"x.safetensors"}})"),
            "'model.safetensors.index.json': damaged header: the key 'a' is repeated");
  EXPECT_EQ(index(R"({"weight_map":[]})"), "'model.safetensors.index.json': 'weight_map' is missing");
  EXPECT_EQ(index("{"), "'model.safetensors.index.json': damaged header: not a JSON object");
  for (const char *outside :
       {"\"../x.safetensors\"", "\"/etc/passwd\"", "\"sub/x.safetensors\"", "\"..\"", "\"\"", "3"})
    EXPECT_EQ(
        index(std::string(R"({"weight_map":{"a":)") + outside + "}}"),
        "'model.safetensors.index.json': tensor 'a' has an invalid file name, expected a file in the same folder");
}

/// A file with one tensor of a byte.
std::string one(const std::string &name, char value) {
  const std::string header = R"({")" + name + R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char *>(&length), 8) + header + value;
}

// The index decides; what is not read is said, and what cannot be meant is refused.
TEST_F(Safetensors, FilesBesideAnIndex) {
  std::vector<std::string> notes;
  const auto read = [&] {
    Checkpoint checkpoint;
    const Status status = readCheckpoint(folder_.path(), checkpoint);
    notes = checkpoint.notes;
    for (std::string &note : notes)
      note = shorten(note);
    EXPECT_TRUE(!status.ok() || static_cast<char>(*checkpoint.tensors.at("a").data) == '1');
    return shorten(status.message());
  };
  put("model-00001-of-00002.safetensors", one("a", '1'));
  put("model-00002-of-00002.safetensors", one("b", '2'));
  put("model.safetensors.index.json",
      R"({"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}})");
  EXPECT_EQ(read(), "");
  EXPECT_TRUE(notes.empty());

  put("consolidated.safetensors", one("c", '3'));
  put("model-00003-of-00003.safetensors", one("c", '3')); // of another set
  EXPECT_EQ(read(), "");
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("not read, because 'model.safetensors.index.json' does not list them: "
                          "'consolidated.safetensors', 'model-00003-of-00003.safetensors'"),
            std::string::npos)
      << notes[0];
  fs::remove(path("consolidated.safetensors"));
  fs::remove(path("model-00003-of-00003.safetensors"));

  put("model-00003-of-00002.safetensors", one("c", '3'));
  EXPECT_EQ(read(),
            "'model-00003-of-00002.safetensors' is not in the index 'model.safetensors.index.json', which lists "
            "'model-00001-of-00002.safetensors' and lacks 'c': add its tensors to the index, or remove the file");
  fs::remove(path("model-00003-of-00002.safetensors"));

  // An overlay: a later file has a tensor again, and the index points to it.
  put("overlay.safetensors", one("a", '1'));
  put("model-00001-of-00002.safetensors", one("a", '9'));
  put("model-00002-of-00002.safetensors",
      file(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          2));
  put("model.safetensors.index.json",
      R"({"weight_map":{"a":"overlay.safetensors","b":"model-00002-of-00002.safetensors"}})");
  EXPECT_EQ(read(), "");
  ASSERT_EQ(notes.size(), 2u);
  EXPECT_EQ(notes[0], "'model-00002-of-00002.safetensors': left out 'a', which the index has in another file");
  EXPECT_NE(notes[1].find("does not list them: 'model-00001-of-00002.safetensors'"), std::string::npos) << notes[1];
}

TEST_F(Safetensors, OneFileBesideAnIndex) {
  const auto read = [&] {
    Checkpoint checkpoint;
    return shorten(readCheckpoint(folder_.path(), checkpoint).message());
  };
  put("x.safetensors", file(kGood, 27));
  put("model.safetensors", file(kGood, 27));
  put("model.safetensors.index.json", R"({"weight_map":{"a":"x.safetensors","b":"x.safetensors"}})");
  EXPECT_EQ(read(), ""); // the same
  std::string other = file(kGood, 27);
  other.back() = 'y';
  put("model.safetensors", other);
  const std::string rest = ": transformers reads 'model.safetensors', others the files of the index; expected the same "
                           "tensors in both; remove one of them, or name the file";
  EXPECT_EQ(read(), "'model.safetensors' is not in the index beside it, and tensor 'b' has other values there" + rest);
  put("model.safetensors", one("a", '1'));
  EXPECT_EQ(read(),
            "'model.safetensors' is not in the index beside it, and tensor 'a' has another dtype or shape there" +
                rest);
  put("model.safetensors", one("c", '1'));
  EXPECT_EQ(read(), "'model.safetensors' is not in the index beside it, and tensor 'c' is in it alone" + rest);
  put("model.safetensors.index.json", R"({"weight_map":{"c":"model.safetensors"}})");
  EXPECT_EQ(read(), "");
}

} // namespace
