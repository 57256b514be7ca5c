// SPDX-License-Identifier: Apache-2.0
// Public structs of programs that were compiled with an older or a newer header than the library.

#include "executor/api/struct_size.h"

#include "tests/verify/support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace reshard {

namespace {

using testing::Each;
using testing::HasSubstr;

/// A struct of a program whose header is newer than the library.
template <class Struct> struct Newer {
  Struct known;
  uint64_t added[2];
};

/// Three versions of a struct. The library is of the second.
struct First {
  size_t size;
  uint64_t a;
};
struct Second {
  size_t size;
  uint64_t a, b;
};
using Third = Newer<Second>;
constexpr PublicStruct kSecond{"second", "SECOND_INITIALIZER", sizeof(Second), sizeof(First)};

template <class Struct> bool zeroAfterSize(const Struct &value) {
  const auto *bytes = reinterpret_cast<const std::byte *>(&value);
  return std::all_of(bytes + sizeof(size_t), bytes + sizeof value, [](std::byte byte) { return byte == std::byte{0}; });
}

class StructSizeTest : public testing::Test {
public:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(tests::compile("version: 1\n"
                                           "model: {dtype: bf16, tensors: {w: {shape: [6], shard: {0: tp}}, v: [2]}}\n"
                                           "source: {mesh: {tp: 2}}\n"
                                           "target: {mesh: {}}\n",
                                           folder_ / "plan"));
    ASSERT_EQ(reshard_plan_open((folder_ / "plan").c_str(), &plan_), RESHARD_OK);
  }
  void TearDown() override { reshard_plan_close(plan_); }

  /// The status of an open, and its error text in error_.
  reshard_status open(const reshard_options *options) {
    reshard_executor *executor = nullptr;
    const reshard_status status = reshard_open((folder_ / "plan").c_str(), nullptr, 0, options, &executor);
    error_ = reshard_error(executor);
    reshard_close(executor);
    return status;
  }

  tests::TemporaryFolder folder_;
  std::string error_;
  reshard_plan *plan_ = nullptr;
};

TEST(StructSize, InitializersSetTheSizeAndNothingElse) {
  const reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  const reshard_transform transform = RESHARD_TRANSFORM_INITIALIZER;
  const reshard_store store = RESHARD_STORE_INITIALIZER;
  const reshard_summary summary = RESHARD_SUMMARY_INITIALIZER;
  const reshard_endpoint endpoint = RESHARD_ENDPOINT_INITIALIZER;
  EXPECT_EQ(options.size, sizeof options);
  EXPECT_EQ(transform.size, sizeof transform);
  EXPECT_EQ(store.size, sizeof store);
  EXPECT_EQ(summary.size, sizeof summary);
  EXPECT_EQ(endpoint.size, sizeof endpoint);
  EXPECT_TRUE(zeroAfterSize(transform) && zeroAfterSize(summary) && zeroAfterSize(store));
  EXPECT_TRUE(!options.transport && !options.device && options.threads == 0 && options.join_seconds == 0 &&
              options.no_local_shortcut == 0 && options.insecure == 0 && !options.communicator && !options.rendezvous &&
              !options.store && !options.job && !options.secret);
  EXPECT_TRUE(!endpoint.role && !endpoint.layout && endpoint.storage == 0 && !endpoint.ranks &&
              endpoint.rank_count == 0);
}

/// The sizes of the first version. They never change: older programs have them.
TEST(StructSize, FirstVersions) {
  static_assert(sizeof(void *) == 8);
  EXPECT_EQ(kPublicStruct<reshard_options>.firstSize, 88u);
  EXPECT_EQ(kPublicStruct<reshard_store>.firstSize, 32u);
  EXPECT_EQ(kPublicStruct<reshard_transform>.firstSize, 40u);
  EXPECT_EQ(kPublicStruct<reshard_transformed>.firstSize, 80u);
  EXPECT_EQ(kPublicStruct<reshard_summary>.firstSize, 112u);
  EXPECT_EQ(kPublicStruct<reshard_endpoint>.firstSize, 48u);
  EXPECT_EQ(kPublicStruct<reshard_param>.firstSize, 64u);
}

TEST(StructSize, SizesByName) {
  EXPECT_EQ(reshard_struct_size("reshard_options"), sizeof(reshard_options));
  EXPECT_EQ(reshard_struct_size("reshard_store"), sizeof(reshard_store));
  EXPECT_EQ(reshard_struct_size("reshard_transform"), sizeof(reshard_transform));
  EXPECT_EQ(reshard_struct_size("reshard_transformed"), sizeof(reshard_transformed));
  EXPECT_EQ(reshard_struct_size("reshard_summary"), sizeof(reshard_summary));
  EXPECT_EQ(reshard_struct_size("reshard_endpoint"), sizeof(reshard_endpoint));
  EXPECT_EQ(reshard_struct_size("reshard_param"), sizeof(reshard_param));
  EXPECT_EQ(reshard_struct_size("reshard_plan"), 0u);
  EXPECT_EQ(reshard_struct_size(nullptr), 0u);
}

TEST(StructSize, ReadsStructsOfAllVersions) {
  Second own{1, 2, 3};
  const First first{sizeof(First), 7};
  EXPECT_EQ(readStruct(kSecond, &first, &own).message(), "");
  EXPECT_EQ(own.size, sizeof(Second));
  EXPECT_EQ(own.a, 7u);
  EXPECT_EQ(own.b, 0u);
  const Second second{sizeof(Second), 8, 9};
  EXPECT_EQ(readStruct(kSecond, &second, &own).message(), "");
  EXPECT_EQ(own.a, 8u);
  EXPECT_EQ(own.b, 9u);
  Third third{{sizeof(Third), 5, 6}, {0, 0}};
  EXPECT_EQ(readStruct(kSecond, &third, &own).message(), "");
  EXPECT_EQ(own.size, sizeof(Second));
  EXPECT_EQ(own.a, 5u);
  EXPECT_EQ(own.b, 6u);
  third.known.a = 1;
  third.added[1] = 1;
  EXPECT_EQ(readStruct(kSecond, &third, &own).message(),
            "second: found a field that is not 0 at byte 32, expected a struct of 24 bytes: the program was compiled "
            "with a newer header; install the libreshard of that version");
  EXPECT_EQ(own.a, 5u); // unchanged
}

TEST(StructSize, RejectsStructsWithoutAnInitializer) {
  Second own{1, 2, 3};
  for (const auto &[size, expected] : {std::pair<size_t, const char *>{0, "16 or more"},
                                       {8, "16 or more"},
                                       {15, "16 or more"},
                                       {4097, "at most 4096"},
                                       {SIZE_MAX, "at most 4096"}}) {
    const Second given{size, 8, 9};
    EXPECT_EQ(readStruct(kSecond, &given, &own).message(), "second.size: found " + std::to_string(size) +
                                                               ", expected " + expected +
                                                               "; initialize the struct with SECOND_INITIALIZER");
    Second filled{size, 4, 4};
    EXPECT_FALSE(writeStruct(kSecond, &given, &filled));
    EXPECT_EQ(filled.size, size);
    EXPECT_EQ(filled.a, 4u);
  }
  EXPECT_EQ(own.a, 2u);
}

TEST(StructSize, WritesStructsOfAllVersions) {
  const Second filled{sizeof(Second), 8, 9};
  Second older{sizeof(First), 1, 1}; // the library must not touch b
  EXPECT_TRUE(writeStruct(kSecond, &filled, &older));
  EXPECT_EQ(older.size, sizeof(First));
  EXPECT_EQ(older.a, 8u);
  EXPECT_EQ(older.b, 1u);
  Third newer{{sizeof(Third), 1, 1}, {1, 1}};
  EXPECT_TRUE(writeStruct(kSecond, &filled, &newer));
  EXPECT_EQ(newer.known.size, sizeof(Second));
  EXPECT_EQ(newer.known.b, 9u);
  EXPECT_EQ(newer.added[0], 1u);
}

TEST_F(StructSizeTest, Options) {
  const std::string initialize = ", expected 88 or more; initialize the struct with RESHARD_OPTIONS_INITIALIZER";
  for (const size_t size : {size_t{0}, sizeof(size_t), offsetof(reshard_options, pull) - 1}) {
    reshard_options options = RESHARD_OPTIONS_INITIALIZER;
    options.size = size;
    EXPECT_EQ(open(&options), RESHARD_INVALID);
    EXPECT_EQ(error_, "reshard_options.size: found " + std::to_string(size) + initialize);
  }
  reshard_options older = RESHARD_OPTIONS_INITIALIZER;
  older.size = offsetof(reshard_options, pull);
  older.pull = 1; // behind the end of the older struct
  EXPECT_EQ(open(&older), RESHARD_OK) << error_;
  older.size = sizeof older;
  EXPECT_EQ(open(&older), RESHARD_INVALID);
  EXPECT_EQ(error_, "pull mode needs transport 'ucx', found 'threads'");
  Newer<reshard_options> newer{RESHARD_OPTIONS_INITIALIZER, {0, 0}};
  newer.known.size = sizeof newer;
  newer.known.transport = "smoke";
  EXPECT_EQ(open(&newer.known), RESHARD_INVALID);
  EXPECT_THAT(error_, HasSubstr("unknown transport 'smoke'")); // it was read
  newer.known.transport = "threads";
  EXPECT_EQ(open(&newer.known), RESHARD_OK) << error_;
  newer.added[1] = 1;
  EXPECT_EQ(open(&newer.known), RESHARD_INVALID);
  EXPECT_THAT(error_, HasSubstr("reshard_options: found a field that is not 0 at byte 120, expected a struct of 112"));
  EXPECT_EQ(open(nullptr), RESHARD_OK) << error_;
}

TEST_F(StructSizeTest, Transforms) {
  reshard_executor *executor = nullptr;
  ASSERT_EQ(reshard_open((folder_ / "plan").c_str(), nullptr, 0, nullptr, &executor), RESHARD_OK);
  Newer<reshard_transform> newer{RESHARD_TRANSFORM_INITIALIZER, {0, 0}};
  EXPECT_EQ(reshard_set_transform(executor, "pack", &newer.known), RESHARD_OK);
  newer.known.size = 0;
  EXPECT_EQ(reshard_set_transform(executor, "pack", &newer.known), RESHARD_INVALID);
  EXPECT_STREQ(reshard_error(executor), "reshard_transform.size: found 0, expected 40 or more; initialize the struct "
                                        "with RESHARD_TRANSFORM_INITIALIZER");
  newer.known.size = sizeof newer;
  EXPECT_EQ(reshard_set_transform(executor, "pack", &newer.known), RESHARD_OK) << reshard_error(executor);
  newer.added[0] = 1;
  EXPECT_EQ(reshard_set_transform(executor, "pack", &newer.known), RESHARD_INVALID);
  EXPECT_THAT(reshard_error(executor), HasSubstr("reshard_transform: found a field that is not 0 at byte 40"));
  reshard_close(executor);
}

TEST_F(StructSizeTest, SummariesAndEndpoints) {
  for (const size_t size : {size_t{0}, sizeof(size_t), sizeof(reshard_endpoint) - 1}) {
    reshard_summary summary = RESHARD_SUMMARY_INITIALIZER;
    reshard_endpoint endpoint = RESHARD_ENDPOINT_INITIALIZER;
    summary.size = endpoint.size = size;
    EXPECT_EQ(reshard_plan_summary(plan_, &summary), RESHARD_INVALID);
    EXPECT_EQ(reshard_plan_endpoint(plan_, 0, &endpoint), RESHARD_INVALID);
    EXPECT_TRUE(zeroAfterSize(summary));
    EXPECT_EQ(endpoint.role, nullptr);
  }
  Newer<reshard_summary> summary{RESHARD_SUMMARY_INITIALIZER, {7, 7}};
  summary.known.size = sizeof summary;
  EXPECT_EQ(reshard_plan_summary(plan_, &summary.known), RESHARD_OK);
  EXPECT_EQ(summary.known.size, sizeof(reshard_summary));
  EXPECT_EQ(summary.known.target_bytes, 16u);
  EXPECT_THAT(summary.added, Each(7u));
  Newer<reshard_endpoint> endpoint{RESHARD_ENDPOINT_INITIALIZER, {7, 7}};
  endpoint.known.size = sizeof endpoint;
  EXPECT_EQ(reshard_plan_endpoint(plan_, 1, &endpoint.known), RESHARD_OK);
  EXPECT_EQ(endpoint.known.size, sizeof(reshard_endpoint));
  EXPECT_EQ(endpoint.known.rank_count, 1u);
  EXPECT_THAT(endpoint.added, Each(7u));
}

TEST_F(StructSizeTest, ArraysHaveElementsOfTheCallersSize) {
  const reshard_param *params = nullptr;
  size_t count = 0;
  for (const size_t size :
       {size_t{0}, sizeof(size_t), sizeof(reshard_param) - 1, sizeof(reshard_param) + 1, size_t{4104}}) {
    EXPECT_EQ(reshard_plan_params(plan_, 0, 1, size, &params, &count), RESHARD_INVALID) << size;
    EXPECT_EQ(params, nullptr);
  }
  ASSERT_EQ(reshard_plan_params(plan_, 0, 1, sizeof(reshard_param), &params, &count), RESHARD_OK);
  ASSERT_EQ(count, 2u);
  const reshard_param *newerParams = nullptr, *again = nullptr;
  ASSERT_EQ(reshard_plan_params(plan_, 0, 1, sizeof(Newer<reshard_param>), &newerParams, &count), RESHARD_OK);
  ASSERT_EQ(count, 2u);
  const auto *newer = reinterpret_cast<const Newer<reshard_param> *>(newerParams);
  for (size_t p = 0; p < count; ++p) {
    EXPECT_EQ(params[p].size, sizeof(reshard_param));
    EXPECT_EQ(newer[p].known.size, sizeof(Newer<reshard_param>));
    EXPECT_STREQ(newer[p].known.name, params[p].name);
    EXPECT_EQ(newer[p].known.bytes, params[p].bytes);
    EXPECT_THAT(newer[p].added, Each(0u));
  }
  EXPECT_STRNE(params[0].name, params[1].name);
  ASSERT_EQ(reshard_plan_params(plan_, 0, 1, sizeof(reshard_param), &again, &count), RESHARD_OK);
  EXPECT_EQ(again, params); // the list is built once for each size
}

} // namespace

} // namespace reshard
