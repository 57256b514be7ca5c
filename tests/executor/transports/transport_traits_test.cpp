// SPDX-License-Identifier: Apache-2.0
// The table of transports: what each row says is what the executor does and what the documentation says.

#include "executor/interfaces/transport_traits.h"

#include "reshard/reshard.h"
#include "tests/lib/folder.h"
#include "tests/verify/support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

namespace reshard {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

/// The error of reshard_check_options; "" if they are right.
std::string check(const reshard_options &options) {
  char text[1000] = "?";
  const reshard_status status = reshard_check_options(&options, text, sizeof text);
  EXPECT_EQ(status == RESHARD_OK, *text == '\0') << text;
  return text;
}

class TransportTraitsTest : public testing::Test {
public:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(tests::compile("version: 1\n"
                                           "model: {dtype: bf16, tensors: {w: {shape: [6]}}}\n"
                                           "source: {mesh: {}}\n"
                                           "target: {mesh: {}}\n",
                                           folder_ / "plan"));
    url_ = "file://" + folder_.path();
  }
  /// Options with which the transport can be opened.
  reshard_options optionsOf(const TransportTraits &traits) const {
    reshard_options options = RESHARD_OPTIONS_INITIALIZER;
    options.transport = traits.name;
    options.device = traits.device;
    options.join_seconds = 20;
    options.rendezvous = traits.needsRendezvous ? url_.c_str() : nullptr;
    return options;
  }

  tests::TemporaryFolder folder_;
  std::string url_;
};

} // namespace

TEST_F(TransportTraitsTest, TheRowsOfATransportDifferOnlyByDevice) {
  for (const TransportTraits &each : transports()) {
    SCOPED_TRACE(each.name);
    EXPECT_EQ(findTransport(each.name, each.device), &each) << "two rows of one transport and device";
    const TransportTraits &first = *findTransport(each.name);
    EXPECT_STREQ(each.about, first.about);
    EXPECT_EQ(each.processes, first.processes);
    EXPECT_EQ(each.rendezvous, first.rendezvous);
    EXPECT_EQ(each.needsRendezvous, first.needsRendezvous);
    EXPECT_TRUE(each.rendezvous || !each.needsRendezvous);
    EXPECT_TRUE(each.processes || !each.rendezvous);
    EXPECT_TRUE(each.processes || (!each.library && !each.beforeLoading)) << "there is no backend";
    EXPECT_EQ(!each.library, !each.fix);
  }
  const reshard_options none = RESHARD_OPTIONS_INITIALIZER;
  EXPECT_EQ(check(none), "") << "the first row is the default, which needs nothing";
  EXPECT_FALSE(transports().front().processes);
}

TEST_F(TransportTraitsTest, OptionsAreAcceptedAsTheRowsState) {
  for (const std::string &name : transportNames())
    for (const std::string &device : transportDevices()) {
      SCOPED_TRACE(name + " " + device);
      const TransportTraits *traits = findTransport(name, device);
      reshard_options options = RESHARD_OPTIONS_INITIALIZER;
      options.transport = name.c_str();
      options.device = device.c_str();
      if (!traits) {
        EXPECT_THAT(check(options), StartsWith("transport '" + name + "' does not run on device '" + device + "'"));
        continue;
      }
      if (traits->needsRendezvous)
        EXPECT_THAT(check(options), StartsWith("transport '" + name + "' needs a rendezvous"));
      else
        EXPECT_EQ(check(options), "");
      options.rendezvous = url_.c_str();
      EXPECT_EQ(check(options), traits->rendezvous
                                    ? ""
                                    : "transport '" + name + "' has no rendezvous, expected transport " +
                                          oneOf(transportNames(&TransportTraits::rendezvous)) + " with it");
      options.rendezvous = traits->rendezvous ? url_.c_str() : nullptr;
      options.pull = 1;
      EXPECT_EQ(check(options), traits->pull
                                    ? ""
                                    : "pull mode needs transport " + oneOf(transportNames(&TransportTraits::pull)) +
                                          ", found '" + name + "'");
    }
}

// Opens each transport of which the backend is built and the device is there. MPI is not opened: this process may open
// it once only.
TEST_F(TransportTraitsTest, OpenedTransportsDoWhatTheirRowsState) {
  std::vector<std::string> opened;
  for (const TransportTraits &traits : transports()) {
    if (traits.launched())
      continue;
    SCOPED_TRACE(std::string(traits.name) + " " + traits.device);
    const reshard_options options = optionsOf(traits);
    const uint32_t rank = 0;
    reshard_executor *executor = nullptr;
    const reshard_status status = reshard_open((folder_ / "plan").c_str(), &rank, 1, &options, &executor);
    const std::string error = reshard_error(executor);
    if (status == RESHARD_OK) {
      opened.push_back(traits.name);
      EXPECT_EQ(reshard_replace(executor, (folder_ / "plan").c_str(), nullptr, 0, nullptr) == RESHARD_OK,
                traits.replace)
          << reshard_error(executor);
      if (!traits.replace) {
        EXPECT_THAT(reshard_error(executor),
                    HasSubstr("expected " + oneOf(transportNames(&TransportTraits::replace)) + " on "));
      }
      EXPECT_EQ(reshard_stream(executor) != nullptr, traits.recorded());
    } else { // a backend that was not built, a missing library, or no GPU
      EXPECT_EQ(status, RESHARD_FAILED) << error;
      EXPECT_THAT(error,
                  AnyOf(HasSubstr(traits.recorded() ? traits.device : "backend '" + std::string(traits.name) + "'"),
                        StartsWith("no GPU: ")));
    }
    reshard_close(executor);
  }
  EXPECT_THAT(opened, testing::Contains("threads"));
}

TEST_F(TransportTraitsTest, ThoseBetweenProcessesAreListed) {
  for (const std::string &device : transportDevices()) {
    std::vector<std::string> listed;
    for (size_t i = 0; const char *name = reshard_transport(device.c_str(), i); ++i)
      listed.emplace_back(name);
    EXPECT_EQ(listed,
              transportNames([&](const TransportTraits &each) { return each.processes && each.device == device; }));
  }
  EXPECT_STREQ(reshard_transport(nullptr, 0), reshard_transport("cpu", 0));
  EXPECT_EQ(reshard_transport("tpu", 0), nullptr);
  EXPECT_EQ(oneOf({"a"}), "'a'");
  EXPECT_EQ(oneOf({"a", "b", "c"}, ""), "a, b or c");
}

TEST_F(TransportTraitsTest, TheTableOfTheDocumentationIsTheSame) {
  std::string table = "| transport | device | processes | rendezvous | pull mode | replaces a plan | on a stream |\n"
                      "|---|---|---|---|---|---|---|\n";
  const auto cell = [](bool holds, const std::string &text = "yes") { return holds ? " | " + text : " |"; };
  for (const TransportTraits &each : transports())
    table += "| `" + std::string(each.name) + "` | `" + each.device + "` | " +
             (each.processes ? "one for each rank" : "one") +
             cell(each.rendezvous, each.needsRendezvous ? "needed" : "yes") + cell(each.pull) + cell(each.replace) +
             cell(each.recorded()) + " |\n";
  std::ifstream file(RESHARD_SOURCE_DIR "/docs/api.md");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(text, HasSubstr(table + "\n")) << "docs/api.md, Transports: expected this table";
}

} // namespace reshard
