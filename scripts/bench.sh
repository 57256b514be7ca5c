#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All benchmarks of one build tree, one after the other: bench.sh BUILD.
set -eu
# Open MPI's permission to run as root, and more processes than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
for bench in "$1"/tests/bench-* "$1"/bench-*; do
  [ -x "$bench" ] && [ -f "$bench" ] || continue
  case $bench in
  */bench-mpi) mpirun -n 4 "$bench" ;;
  */bench-replace)
    plans=$(mktemp -d)
    "$1/reshard-compile" examples/kimi-k2-256-to-128.yaml -o "$plans/old"
    "$1/reshard-compile" --from="$plans/old" -o "$plans/new" --set=target.ranks=192..319 \
      '--set=source.mesh={megatron: {tp: 8, pp: 8, dp: 3, ep: 24, etp: 1}}'
    "$bench" "$plans/old" "$plans/new"
    rm -r "$plans"
    ;;
  *) "$bench" ;;
  esac
done
