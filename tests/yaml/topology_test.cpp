// SPDX-License-Identifier: Apache-2.0
// topology.yaml: all keys, units and errors.

#include "base/yaml/node.h"
#include "base/yaml/topology.h"
#include "tests/lib/folder.h"

#include <gtest/gtest.h>

#include <fstream>

using namespace reshard;

namespace {

std::optional<Topology> read(const std::string &text, std::string &errors) {
  Diagnostics diagnostics;
  const auto root = parseYaml(diagnostics.addFile("t.yaml", text), diagnostics);
  auto topology = root ? readTopology(*root, diagnostics) : std::nullopt;
  errors = diagnostics.text();
  return topology;
}

TEST(Topology, ReadsUnits) {
  std::string errors;
  const auto t = read("ranks_per_node: 4\nlink: {rate: 10GB/s, latency: 2us}\nnics: {per_node: 2, rate: 100 Gb/s, "
                      "latency: 500ns}\ncopy: {rate: 8MB/s}\n",
                      errors);
  ASSERT_TRUE(t) << errors;
  EXPECT_EQ(*t, (Topology{4, 10'000'000'000, 2000, 2, 12'500'000'000, 500, 8'000'000}));
}

TEST(Topology, AssignsNicsToRanksInOrder) {
  const Topology t{4, 1, 0, 2, 1, 0, 1};
  std::vector<int64_t> nics;
  for (int64_t rank = 0; rank < 8; ++rank)
    nics.push_back(t.nic(rank));
  EXPECT_EQ(nics, (std::vector<int64_t>{0, 0, 1, 1, 2, 2, 3, 3}));
  EXPECT_EQ(t.node(5), 1);
  EXPECT_EQ(Topology{}.nic(5), 5);
  EXPECT_EQ(Topology{}.node(5), 0);
}

TEST(Topology, RefusesInvalidValues) {
  const std::pair<const char *, const char *> cases[] = {
      {"link: {rate: 1GB/s}", "missing key 'ranks_per_node'"},
      {"ranks_per_node: 8\nlink: {rate: 450}", "expected a rate per direction"},
      {"ranks_per_node: 8\nlink: {rate: 1.5GB/s}", "expected a rate per direction"},
      {"ranks_per_node: 8\nlink: {rate: 0GB/s}", "expected a rate per direction"},
      {"ranks_per_node: 8\nlink: {rate: 99999999999999999999GB/s}", "expected a rate per direction"},
      {"ranks_per_node: 8\nlink: {latency: 1us}", "missing key 'rate'"},
      {"ranks_per_node: 8\nnics: {per_node: 9, rate: 1GB/s}", "expected at most 8 ('ranks_per_node')"},
      {"ranks_per_node: 8\nnics: {per_node: 1, rate: 1GB/s, latency: 3}", "expected a time"},
      {"ranks_per_node: 8\ncopy: 3", "expected a map for 'copy'"},
      {"ranks_per_node: 8\nlinks: {}", "did you mean 'link'?"},
  };
  for (const auto &[text, expected] : cases) {
    std::string errors;
    EXPECT_FALSE(read(text, errors)) << text;
    EXPECT_NE(errors.find(expected), std::string::npos) << text << "\n" << errors;
  }
}

TEST(Topology, AFileWithADuplicateKeyIsRefused) {
  const tests::TemporaryFolder folder;
  std::ofstream(folder / "t.yaml") << "ranks_per_node: 8\nlink: {rate: 1GB/s, latency: 3us, latency: 3us}\n";
  Diagnostics diagnostics;
  EXPECT_FALSE(readTopologyFile(folder / "t.yaml", diagnostics));
  EXPECT_NE(diagnostics.text().find("duplicate key"), std::string::npos) << diagnostics.text();
}

} // namespace
