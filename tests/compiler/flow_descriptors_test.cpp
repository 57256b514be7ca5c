// SPDX-License-Identifier: Apache-2.0
// The descriptors of flows, cut where messages end. Flows to copies of a target share them until they are cut.

#include "compiler/schedule/flow_descriptors.h"

#include <gtest/gtest.h>

using namespace reshard;
using namespace reshard::ir;

TEST(FlowDescriptors, FlowsToCopiesShareDescriptorsUntilTheyAreCut) {
  Interner<Shape> shapes;
  Descriptor whole;
  whole.shape = shapes.intern({1024, {}});
  const std::vector<Descriptor> all = {whole};
  DescriptorCutter cutter(shapes);
  FlowDescriptors descriptors(all, shapes, cutter);
  descriptors.beginFlow();
  descriptors.add(0);
  descriptors.repeat({0, 0, 0}); // the same to three copies
  auto message = [](uint32_t flow, int64_t begin, int64_t end) {
    Message message;
    message.grants = {{flow, 0, begin, end}};
    return message;
  };
  descriptors.cut({message(0, 0, 1024), message(1, 0, 256), message(1, 256, 1024), message(2, 0, 1024)});

  ASSERT_EQ(descriptors.ranges(0).size(), 1u);
  EXPECT_EQ(descriptors.ranges(2).data(), descriptors.ranges(0).data());
  const auto parts = descriptors.ranges(1);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].begin, 0);
  EXPECT_EQ(parts[1].begin, 256);
  EXPECT_EQ(bytesOf(shapes[descriptors[parts[0].descriptor].shape]), 256);
  EXPECT_EQ(bytesOf(shapes[descriptors[parts[1].descriptor].shape]), 768);
  EXPECT_EQ(descriptors[parts[1].descriptor].sourceOffset, 256);
}
