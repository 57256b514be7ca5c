# SPDX-License-Identifier: Apache-2.0
"""A refit between tensors of device "cuda". package_test.py runs it with the fake CUDA backend of the tests."""

import ctypes

import numpy as np

import reshard
from device_tensor import DeviceTensor

with open("job.yaml", "w") as file:
    file.write(
        "{version: 1, model: {dtype: fp32, tensors: {w: {shape: [4, 6], shard: {0: tp}}}}, source: {mesh: {tp: 2}}, "
        "target: {mesh: {}, ranks: [2]}}"
    )
plan = reshard.compile("job.yaml")
executor = reshard.Executor(plan, device="cuda")
arrays = {rank: np.zeros(plan.params(rank)["w"].shape, np.float32) for rank in range(3)}
try:
    executor.bind({"w": arrays[0]}, rank=0)
    raise AssertionError("bind accepted host memory for device cuda")
except reshard.BindError as error:
    assert "found device cpu, expected cuda" in str(error), error
for rank, array in arrays.items():
    executor.bind({"w": DeviceTensor(array)}, rank=rank)
executor.prepare()


class Stream:
    cuda_stream = 4096


for step, run in enumerate(
    (lambda: executor.run(timeout=60), lambda: executor.run(stream=Stream()), lambda: executor.run(4096)), 1
):
    arrays[0][...], arrays[1][...] = step, 10 * step
    run()
    assert arrays[2][:, 0].tolist() == [step, step, 10 * step, 10 * step], arrays[2]
assert executor.version == 1  # runs on a stream are not counted

# Hooks of a transform enqueue on a stream. With the fake backend, their memory is ordinary host memory.
with open("transform.yaml", "w") as file:
    file.write(
        "{version: 1, model: {dtype: fp32, tensors: {w: {shape: [2, 2]}}, layouts: {t: {params: same}, s: {params: "
        "{w: {holds: w, transform: pack}}}},"
        " }, source: {layout: t, mesh: {}}, target: {layout: s, mesh: {}, ranks: [1]}}"
    )
executor, seen, source = (
    reshard.Executor(reshard.compile("transform.yaml"), device="cuda"),
    [],
    np.full((2, 2), 7, np.float32),
)
executor.bind({"w": DeviceTensor(source)}, rank=0)
executor.set_transform("pack", finalize=seen.append)
executor.prepare()
(param,) = seen
executor.run(timeout=60)
assert len(seen) == 1, seen
assert param.device == "cuda" and param.stream != 0, param
interface = param.__cuda_array_interface__
assert (interface["shape"], interface["typestr"], interface["data"]) == ((16,), "|u1", (param.address, False)), (
    interface
)
assert np.ctypeslib.as_array((ctypes.c_float * 4).from_address(param.address)).tolist() == [7] * 4
print("right")
