// SPDX-License-Identifier: Apache-2.0
// DTensors: the part of a rank, from the device mesh and the placements.
#pragma once

#include "checkpoints/distributed_tensor.h"

#include <span>

namespace reshard::analysis {

constexpr std::string_view kDTensor = "torch.distributed.tensor DTensor";

std::span<const std::string_view> dtensorGlobals();

/// Reads the state of a DTensor, whose shape `found.part` has. Returns an error text, empty on success.
std::string readDTensor(const Pickle &pickle, Pickle::Value state, DistributedTensor &found, ReadBudget &budget);

} // namespace reshard::analysis
