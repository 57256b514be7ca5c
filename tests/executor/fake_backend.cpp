// SPDX-License-Identifier: Apache-2.0
// Replaces libreshard_cuda.so and libreshard_nccl.so in tests: the tests' CPU device and communicator, for one rank.

#include "tests/executor/cpu_device.h"

extern "C" {

extern const uint32_t reshard_open_device_version = reshard::kDeviceVersion;
extern const uint32_t reshard_open_communicator_version = reshard::kCommunicatorVersion;

reshard::Device *reshard_open_device(int, reshard::Status &) { return new reshard::tests::CpuDevice(1); }

reshard::Communicator *reshard_open_communicator(const reshard::CommunicatorOptions &options, reshard::Status &error) {
  static reshard::tests::FakeFabric fabric;
  if (options.size == 1)
    return new reshard::tests::CpuCommunicator(fabric, 0, 1);
  error = reshard::failed("found a plan of " + std::to_string(options.size) + " ranks, expected 1");
  return nullptr;
}
}
