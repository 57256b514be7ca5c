// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/stored_format.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

namespace reshard::checkpoints {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMaxEntries = 10'000; // how many entries of a folder are looked at
constexpr const char *kSavePretrained =
    "load it with transformers' from_pretrained and save it with save_pretrained, which writes safetensors";
constexpr const char *kGguf =
    "GGUF, llama.cpp's format, which reshard does not read; take the safetensors that it was made of";
constexpr const char *kNemo =
    "an archive of NeMo; unpack it with 'tar -xf' and name its folder 'model_weights' or 'weights'";

/// A form of weights: a name in a folder, of a file or a folder. `begin` and `end` are of the name, either may be
/// empty.
struct Form {
  const char *begin, *end;
  bool folder;
  const char *advice; // what it is; what to do
};

/// The first one that fits decides.
constexpr Form kForms[] = {
    {"pytorch_model.bin.index.json", "", false, kSavePretrained},
    {"pytorch_model", ".bin", false, "a file of torch.save; name the file itself, if it has all weights"},
    {"adapter_model", ".bin", false, "a file of torch.save; name the file itself"},
    {"consolidated.", ".pth", false, "a file of torch.save; name the file itself, if it has all weights"},
    {"", ".gguf", false, kGguf},
    {"", ".nemo", false, kNemo},
    {"", "_model_states.pt", false,
     "DeepSpeed's form of ZeRO; 'python zero_to_fp32.py . OUT --safe_serialization', a script that DeepSpeed saves "
     "beside it, writes safetensors"},
    {"zero_to_fp32.py", "", false,
     "a checkpoint of DeepSpeed; 'python zero_to_fp32.py . OUT --safe_serialization' writes safetensors"},
    {"iter_", "", true, "a folder of Megatron-LM that is no torch_dist checkpoint; name it to see what it has"},
    {"global_step", "", true, "a folder of DeepSpeed; name it to see what it has"},
    {"checkpoint-", "", true, "a folder of transformers' Trainer; name it to see what it has"},
    {"mp_rank_", "", true,
     "Megatron's format 'torch'; save with '--ckpt-format torch_dist', or convert it with Megatron-LM's "
     "tools/checkpoint/convert.py"},
    {"manifest.ocdbt", "", false, "a checkpoint of Orbax; restore it with Orbax and save the arrays as safetensors"},
    {"_CHECKPOINT_METADATA", "", false,
     "a checkpoint of Orbax; restore it with Orbax and save the arrays as safetensors"},
    {"flax_model", ".msgpack", false,
     "weights of Flax; load them with from_pretrained(from_flax=True) and save them with "
     "save_pretrained"},
    {"tf_model", ".h5", false,
     "weights of TensorFlow; load them with from_pretrained(from_tf=True) and save them with save_pretrained"},
    {"", ".distcp", false,
     "files of torch.distributed.checkpoint without '.metadata', which is written last: the save did "
     "not end"},
    {"", ".ckpt", false, "a file of torch.save; name the file itself, if it has all weights"},
    {"", ".pth", false, "a file of torch.save; name the file itself, if it has all weights"},
    {"", ".pt", false, "a file of torch.save; name the file itself, if it has all weights"},
    {"", ".bin", false, "perhaps a file of torch.save; name the file itself, if it has all weights"},
};

bool fits(const Form &form, const std::string &name, bool folder) {
  const std::string_view begin = form.begin, end = form.end;
  const bool whole = !begin.empty() && end.empty() && !form.folder;
  return folder == form.folder && (whole ? name == begin : name.starts_with(begin) && name.ends_with(end));
}

} // namespace

std::string unreadWeights(const std::string &folder) {
  std::vector<std::string> files, folders, checkpoints;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end;
       !error && at != end && files.size() + folders.size() < kMaxEntries; at.increment(error)) {
    std::error_code lost;
    (at->is_directory(lost) ? folders : files).push_back(at->path().filename().string());
  }
  std::sort(files.begin(), files.end());
  std::sort(folders.begin(), folders.end());
  std::copy_if(folders.begin(), folders.end(), std::back_inserter(checkpoints),
               [&](const std::string &name) { return isCheckpoint(folder + "/" + name); });
  if (!checkpoints.empty())
    return "found checkpoints in folders of it: name one, such as '" + checkpoints.back() + "'";
  for (const Form &form : kForms)
    for (const std::string &name : form.folder ? folders : files)
      if (fits(form, name, form.folder))
        return "found '" + name + "': " + form.advice;
  for (const std::string &name : folders)
    if (const fs::path inside = fs::path(folder) / name;
        fs::exists(inside / ".zarray", error) || fs::exists(inside / "zarr.json", error))
      return "found '" + name +
             "': an array of zarr; load the checkpoint with Megatron-Core, and save it with "
             "'--dist-ckpt-format torch_dist'";
  return {};
}

std::string unreadFile(const std::string &path) {
  constexpr size_t kBytes = 8;
  std::string begin(kBytes, '\0');
  std::ifstream(path, std::ios::binary).read(begin.data(), kBytes);
  if (begin.starts_with("GGUF"))
    return kGguf;
  if (path.ends_with(".nemo"))
    return kNemo;
  if (begin.starts_with("\x89HDF\r\n"))
    return "a file of HDF5; expected safetensors, which transformers' save_pretrained writes";
  if (path.ends_with(".msgpack"))
    return "a file of Flax; expected safetensors, which transformers' save_pretrained writes";
  if (path.ends_with(".index.json"))
    return "an index; name its folder";
  return {};
}

} // namespace reshard::checkpoints
