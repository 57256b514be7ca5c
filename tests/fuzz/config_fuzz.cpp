// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any bytes as the config.json of a model are read or give an error.

#include "tests/fuzz/files.h"
#include "tests/fuzz/read_job.h"

using namespace reshard;

namespace {

/// A job that reads numbers, texts and lists of a config, also of an object in it.
constexpr const char *kJob = R"(version: 1
model:
  config: config.json
  dtype: bf16
  let: {layers: $num_hidden_layers, hidden: $text_config.hidden_size or $hidden_size, heads: $num_attention_heads or 4, tied: $tie_word_embeddings or 0}
  index: {layer: layers}
  tensors: {w: [hidden, heads], "layers.{layer}.w": [hidden, hidden]}
  layouts: {same: {params: same}}
source: {layout: same, mesh: {tp: 2}}
target: {layout: same, mesh: {tp: 2}}
)";

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const std::string path = tests::fuzzFolder() / "job.yaml", config = tests::fuzzFolder() / "config.json";
  [[maybe_unused]] static const bool written = (tests::put(path, kJob), true);
  tests::put(config, tests::textOf(data, size));
  tests::readAndResolve(path);
  return 0;
}
