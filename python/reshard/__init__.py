# SPDX-License-Identifier: Apache-2.0
"""reshard: moves a model's weights from one distribution over ranks to another with a precompiled plan.

plan = reshard.compile("refit.yaml")
executor = reshard.Executor(plan, transport="mpi")
executor.bind({name: tensor, ...})
executor.prepare()
executor.run(timeout=60)                                 # for every refit
"""

from __future__ import annotations

# Nothing is imported before it is used: the scripts of the commands import this package, and then become a command.
TYPE_CHECKING = False  # type checkers take it as true, as that of typing, which takes time to import
if TYPE_CHECKING:
    from pathlib import Path

    from .compiler import compile
    from .description import describe
    from .errors import BindError, CompileError, Error, PlanError, RunError, TimeoutError
    from .executor import Executor, Replica, TensorDigest, check_rendezvous
    from .plan import Endpoint, Param, Plan, Summary
    from .transforms import Allocated, Transformed, minus_one, neg_exp

    #: The folder of the models and topologies that are installed with reshard, for ``model:`` and ``extend:`` of a job.
    LIBRARY: Path

__all__ = [
    "LIBRARY", "Allocated", "BindError", "CompileError", "Endpoint", "Error", "Executor", "Param", "Plan", "PlanError",
    "Replica", "RunError", "Summary", "TensorDigest", "TimeoutError", "Transformed", "check_rendezvous", "compile",
    "describe", "minus_one", "neg_exp",
]  # fmt: skip

#: The module of each name above.
_MODULES = {
    "compile": "compiler",
    "describe": "description",
    **dict.fromkeys(("BindError", "CompileError", "Error", "PlanError", "RunError", "TimeoutError"), "errors"),
    **dict.fromkeys(("Executor", "Replica", "TensorDigest", "check_rendezvous"), "executor"),
    **dict.fromkeys(("Endpoint", "Param", "Plan", "Summary"), "plan"),
    **dict.fromkeys(("Allocated", "Transformed", "minus_one", "neg_exp"), "transforms"),
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "PREFIX":
        value = import_module("._library", __name__).PREFIX
    elif name == "LIBRARY":
        value = import_module("._library", __name__).PREFIX / "share" / "reshard"
    elif name in _MODULES:
        value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    elif name in {*_MODULES.values(), "_library"}:  # a module: the import sets the attribute
        return import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
