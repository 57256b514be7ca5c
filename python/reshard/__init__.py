# SPDX-License-Identifier: Apache-2.0
"""reshard: moves a model's weights from one distribution over ranks to another with a precompiled plan.

    plan = reshard.compile("refit.yaml")
    executor = reshard.Executor(plan, transport="mpi")
    executor.bind({name: tensor, ...})
    executor.prepare()
    executor.run(timeout=60)                                 # for every refit
"""

from ._library import PREFIX
from .compiler import compile
from .description import describe
from .errors import BindError, CompileError, Error, PlanError, RunError, TimeoutError
from .executor import Executor, Replica, TensorDigest
from .plan import Endpoint, Param, Plan, Summary
from .recording import record
from .transforms import Allocated, Transformed, minus_one, neg_exp

#: The folder of the models and topologies that are installed with reshard, for ``model:`` and ``extend:`` of a job.
LIBRARY = PREFIX / "share" / "reshard"

__all__ = [
    "LIBRARY",
    "Allocated",
    "BindError",
    "CompileError",
    "Endpoint",
    "Error",
    "Executor",
    "Param",
    "Plan",
    "PlanError",
    "Replica",
    "RunError",
    "Summary",
    "TensorDigest",
    "TimeoutError",
    "Transformed",
    "compile",
    "describe",
    "minus_one",
    "neg_exp",
    "record",
]
