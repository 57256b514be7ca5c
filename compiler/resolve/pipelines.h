// SPDX-License-Identifier: Apache-2.0
// Pipelines: how layers are divided into stages and virtual stages. Formulas: docs/yaml.md, section 5; Megatron-Core's
// are in transformer_block.py (get_num_layers_to_build), transformer_layer.py (get_transformer_layer_offset) and
// pipeline_parallel_layer_layout.py.
#pragma once

#include "compiler/resolve/schemes.h"

#include <optional>
#include <string>
#include <vector>

namespace reshard {

/// A rule's pipeline keys, evaluated.
struct Pipeline {
  int64_t interleave = 1; // model chunks of a rank
  std::optional<int64_t> first, last;
  std::optional<int64_t> embedding, loss;
  std::optional<std::vector<int64_t>> stages; // values of each virtual rank; a rank has stages / ranks model chunks
  std::string key = "stages";                 // the key that states `stages`: "stages" or "pattern"

  /// Whether the rule has no pipeline keys.
  bool plain() const { return interleave == 1 && !first && !last && !embedding && !loss && !stages; }
};

/// Values distributed over ranks in model chunks.
struct PipelineShards {
  DimensionShards shards;          // value -> slot on the rank, model chunk after model chunk
  std::vector<ir::IndexMap> local; // by rank: value -> model chunk * kModelChunkStride + ascending position in it
  int64_t modelChunks = 1;         // for each rank
};

/// Applies a scheme and a pipeline to n values over `ranks` ranks.
llvm::Expected<PipelineShards> applyPipeline(Scheme scheme, Pipeline pipeline, int64_t n, int64_t ranks);

} // namespace reshard
