// Pipelines: how layers are cut into stages and virtual stages. Formulas: docs/yaml.md, section 5; Megatron-Core's are
// in transformer_block.py (get_num_layers_to_build), transformer_layer.py (get_transformer_layer_offset) and
// pipeline_parallel_layer_layout.py.
#pragma once

#include "compiler/resolve/schemes.h"

#include <optional>
#include <string>
#include <vector>

namespace reshard {

/// A rule's pipeline keys, evaluated.
struct Pipeline {
  int64_t interleave = 1; // chunks of a rank
  std::optional<int64_t> first, last;
  std::optional<int64_t> embedding, loss;
  std::optional<std::vector<int64_t>> stages; // by virtual rank; the number of chunks follows
  std::string key = "stages";                 // which says so: that, or "pattern"

  /// Whether it says nothing beyond the scheme.
  bool plain() const { return interleave == 1 && !first && !last && !embedding && !loss && !stages; }
};

/// Values shared out over ranks in chunks. Position p of `local` is chunk p / kChunk, position p % kChunk in it.
struct PipelineShards {
  DimensionShards shards;          // value -> slot on the rank, chunk after chunk
  std::vector<ir::IndexMap> local; // by rank: value -> chunk * kChunk + ascending position in the chunk
  int64_t chunks = 1;              // of a rank
};

/// Applies a scheme and a pipeline to n values over `ranks` ranks. Empty after an error, whose text is in `error`.
std::optional<PipelineShards> applyPipeline(Scheme scheme, Pipeline pipeline, int64_t n, int64_t ranks,
                                            std::string &error);

} // namespace reshard
