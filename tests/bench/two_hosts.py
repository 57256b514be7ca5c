#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark with four processes on two simulated hosts, which exchange messages over TCP.
two_hosts.py BENCHMARK [OPTION...]"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
import hosts
from launch import ENVIRONMENT

if missing := hosts.Hosts.missing():
    sys.exit(f"two_hosts.py: several hosts cannot be simulated: {missing}")
with tempfile.TemporaryDirectory() as folder, hosts.Hosts(2, Path(folder)) as two:
    # The hosts share a kernel: UCX must not use the memory or the devices of the other one.
    ucx = ["env", "UCX_TLS=tcp", "UCX_NET_DEVICES=net0"]
    benchmark = [str(Path(sys.argv[1]).resolve()), *sys.argv[2:]]
    sys.exit(subprocess.run([*two.mpirun(4), "-n", "4", *ucx, *benchmark], env=os.environ | ENVIRONMENT).returncode)
