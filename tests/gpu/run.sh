#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs all checks and benchmarks that need a GPU, on one GPU, in less than eight minutes. Builds the executor with only
# nvcc and g++. The headers of FlatBuffers and the plans come from build/gpu, which tests/gpu/pack.sh fills on a machine
# with the compiler. Exit codes: 0 everything is right and every target is met, 1 failed, 2 a part is missing, 3 no GPU.
# The output is also written to results.txt in build/gpu, or in $OUT if that is set.
set -u
cd "$(dirname "$0")/../.."
packed=build/gpu
bin=$packed/bin
results=${OUT:-$packed}/results.txt
[ -d "$packed/include" ] || { echo "run.sh: build/gpu is empty: run tests/gpu/pack.sh first, on a machine with the compiler" >&2; exit 2; }
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || { echo "run.sh: nvcc is not found in PATH or in /usr/local/cuda/bin: install the CUDA toolkit" >&2; exit 2; }
cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
# NCCL is in the toolkit's folder, in a system folder, or in a Python package.
python=$(python3 -c 'import importlib.util as u; s = u.find_spec("nvidia.nccl"); print(list(s.submodule_search_locations)[0])' 2>/dev/null)
for folder in "$cuda" /usr "$python"; do
  [ -f "$folder/include/nccl.h" ] || continue
  nccl_include=$folder/include
  nccl_library=$(ls "$folder"/lib64/libnccl.so* "$folder"/lib/libnccl.so* "$folder"/lib/*/libnccl.so* 2>/dev/null | head -1)
  [ -n "$nccl_library" ] && break
done
rm -rf "$bin" # removes objects of deleted sources
mkdir -p "$bin/objects"
exec > >(tee "$results") 2>&1

flags="${RESHARD_FLAGS:--O3} -std=c++20 -fPIC -ffp-contract=off -I. -Iinclude -I$packed/include -isystem $cuda/include -DRESHARD_VERSION=\"gpu-test\""
# Compiles one source, with the instruction sets of its CPU level, as CMakeLists.txt does.
compile() {
  case $3 in
    *_avx2.cpp) set -- "$1" "$2 -mavx2 -mf16c" "$3" ;;
    *_avx512.cpp) set -- "$1" "$2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c -mprefer-vector-width=512" "$3" ;;
  esac
  ${CXX:-g++} $2 -c "$3" -o "$1/objects/$(echo "$3" | tr / _).o"
}
export -f compile
build() {
  local sources="executor/api/*.cpp executor/load/*.cpp executor/interfaces/*.cpp executor/memory/*.cpp executor/transports/*.cpp executor/digests/*.cpp executor/pull/*.cpp schema/*.cpp kernels/*.cpp kernels/cpu/*.cpp kernels/gpu/*.cpp base/*.cpp executor/rendezvous/*.cpp tests/gpu/*.cpp executor/backends/cuda.cpp" kernel
  sources="$sources verify/layout/*.cpp verify/check/*.cpp"
  [ -n "${nccl_library:-}" ] && sources="$sources executor/backends/nccl.cpp" && flags="$flags -isystem $nccl_include"
  ls $sources | xargs -P "$(nproc)" -I{} bash -c 'compile "$@"' _ "$bin" "$flags" {} || return 1
  for kernel in copy convert digest; do
    ${RESHARD_LAUNCHER:-} "$nvcc" -O3 -std=c++17 -fmad=false -Xcompiler -fPIC -I. -gencode arch=compute_90,code=[sm_90,compute_90] -Xptxas -v -c kernels/gpu/${kernel}_cuda.cu -o "$bin/objects/${kernel}_cuda.o" || return 1
  done
  local runtime="-L$cuda/lib64 -lcudart_static -ldl -lrt -lpthread"
  g++ -shared "$bin"/objects/executor_backends_cuda.cpp.o "$bin"/objects/*_cuda.o $runtime -o "$bin/libreshard_cuda.so" || return 1
  if [ -n "${nccl_library:-}" ]; then
    g++ -shared "$bin"/objects/executor_backends_nccl.cpp.o "$nccl_library" -Wl,-rpath,"$(dirname "$nccl_library")" $runtime -o "$bin/libreshard_nccl.so" || return 1
  fi
  g++ $(ls "$bin"/objects/*.cpp.o | grep -v '/executor_backends_') $runtime -o "$bin/gpu-test"
}

status=0
summary=""
# section NAME COMMAND...: runs the command and adds its result to the summary.
section() {
  local name=$1 begin=$SECONDS ended=0
  shift
  echo "== $name"
  "$@" || ended=$?
  local word=right
  [ $ended -ne 0 ] && word="FAILED ($ended)" && status=1
  summary="$summary$(printf '  %-48s %-12s %4d s' "$name" "$word" $((SECONDS - begin)))"$'\n'
  return $ended
}

echo "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%Y-%m-%d), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo 'no nvidia-smi')"
section build build || exit 1
plans=$packed/plans
"$bin/gpu-test" graph "$plans/small/refresh.rplan" >/dev/null 2>"$bin/first.txt"
[ $? -eq 3 ] && { cat "$bin/first.txt"; exit 3; }

section "exactness of all plans" "$bin/gpu-test" check "$plans"/small/*.rplan "$plans"/check/*.rplan
section "graphs: capture, consumers, hooks" "$bin/gpu-test" graph "$plans/small/refresh.rplan"
if [ -n "${nccl_library:-}" ]; then
  section "NCCL: captured messages of a rank to itself" "$bin/gpu-test" self "$plans"/self/*.rplan
  section "NCCL: one GPU per rank, if there are enough" "$bin/gpu-test" ranks "$plans"/small/*.rplan
else
  section "NCCL: not found" false
fi
sanitizer=$(command -v compute-sanitizer || echo "$cuda/bin/compute-sanitizer")
if [ -x "$sanitizer" ]; then
  section "compute-sanitizer: plans" "$sanitizer" --tool memcheck --error-exitcode 9 "$bin/gpu-test" check "$plans"/small/*.rplan
  section "compute-sanitizer: graphs" "$sanitizer" --tool memcheck --error-exitcode 9 "$bin/gpu-test" graph "$plans/small/refresh.rplan"
else
  section "compute-sanitizer: not found" false
fi
section "benchmarks" "$bin/gpu-test" bench "$plans/llama3-8b-8-to-4.rplan"
echo "== summary, $SECONDS s"
printf '%s' "$summary"
exit $status
