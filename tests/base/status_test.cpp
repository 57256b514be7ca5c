// SPDX-License-Identifier: Apache-2.0
// Status and Result.

#include "base/status.h"

#include <gtest/gtest.h>

#include <memory>

using namespace reshard;

namespace {

Result<int> half(int number) {
  if (number % 2 != 0)
    return invalid("found " + std::to_string(number) + ", expected an even number");
  return number / 2;
}

Status needEven(int number) { return half(number).status(); }

} // namespace

TEST(StatusTest, SuccessHasNoMessage) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_FALSE(status.timedOut());
  EXPECT_EQ(status.message(), "");
  EXPECT_TRUE(Status().withPrefix("before ").withSuffix(" after").ok());
}

TEST(StatusTest, AnErrorHasAKindAndAMessage) {
  const std::pair<Status, ErrorKind> errors[] = {
      {failed("x"), ErrorKind::failed},         {timedOut("x"), ErrorKind::timedOut},
      {invalid("x"), ErrorKind::invalid},       {badPlan("x"), ErrorKind::badPlan},
      {badBinding("x"), ErrorKind::badBinding}, {negative("x"), ErrorKind::negative}};
  for (const auto &[error, kind] : errors) {
    EXPECT_FALSE(error.ok());
    EXPECT_EQ(error.kind(), kind);
    EXPECT_EQ(error.timedOut(), kind == ErrorKind::timedOut);
    EXPECT_EQ(error.message(), "x");
  }
}

TEST(StatusTest, PrefixAndSuffixKeepTheKind) {
  const Status status = timedOut("waiting").withPrefix("backend 'mpi': ").withSuffix(" for rank 1");
  EXPECT_TRUE(status.timedOut());
  EXPECT_EQ(status.message(), "backend 'mpi': waiting for rank 1");
}

TEST(ResultTest, HasAValueOrAnError) {
  const Result<int> good = half(8);
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(*good, 4);
  EXPECT_TRUE(good.status().ok());
  const Result<int> bad = half(7);
  EXPECT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().kind(), ErrorKind::invalid);
  EXPECT_EQ(bad.status().message(), "found 7, expected an even number");
  EXPECT_TRUE(needEven(2).ok());
  EXPECT_EQ(needEven(3).kind(), ErrorKind::invalid);
}

TEST(ResultTest, ItsValueCanBeMovedOut) {
  Result<std::unique_ptr<std::string>> text = std::make_unique<std::string>("text");
  ASSERT_TRUE(text.ok());
  EXPECT_EQ((*text)->size(), 4u);
  const std::unique_ptr<std::string> moved = std::move(*text);
  EXPECT_EQ(*moved, "text");
}
