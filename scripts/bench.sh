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
  *) "$bench" ;;
  esac
done
