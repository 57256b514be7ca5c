"""A refit between tensors of device "cuda": run by package_test.py where the module of the device is the tests' stand-in."""

import numpy as np
import reshard
from device_tensor import DeviceTensor

with open("job.yaml", "w") as file:
    file.write("{version: 1, model: {dtype: fp32, tensors: {w: {shape: [4, 6], shard: {0: tp}}}}, source: {mesh: {tp: 2}}, target: {mesh: {}, ranks: [2]}}")
plan = reshard.compile("job.yaml")
executor = reshard.Executor(plan, device="cuda")
arrays = {rank: np.zeros(plan.params(rank)["w"].shape, np.float32) for rank in range(3)}
try:
    executor.bind({"w": arrays[0]}, rank=0)
    raise AssertionError("memory of the host is bound")
except reshard.BindError as error:
    assert "found device cpu, expected cuda" in str(error), error
for rank, array in arrays.items():
    executor.bind({"w": DeviceTensor(array)}, rank=rank)
executor.prepare()


class Stream:
    cuda_stream = 4096


for step, run in enumerate((lambda: executor.run(timeout=60), lambda: executor.run(stream=Stream()), lambda: executor.run(4096)), 1):
    arrays[0][...], arrays[1][...] = step, 10 * step
    run()
    assert arrays[2][:, 0].tolist() == [step, step, 10 * step, 10 * step], arrays[2]
assert executor.version == 1  # of what is on a stream nobody knows the end
print("right")
