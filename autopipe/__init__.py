"""autopipe: split a PyTorch model nobody prepared over the devices at hand, and run it.

plan = autopipe.plan(model, inputs, cluster="local:4")
pipe = autopipe.parallelize(model, plan)
loss = pipe.step(batch)

Nothing is loaded before it is asked for: a plan is read and drawn without torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.errors import (
        AutopipeError,
        CaptureError,
        InfeasibleError,
        LaunchError,
        ModelError,
        PlanError,
        ScheduleError,
    )
    from autopipe.formulas import Formulas, cost_formulas
    from autopipe.losses import SumCount
    from autopipe.parallel import parallelize
    from autopipe.plan import Plan
    from autopipe.planning import plan
    from autopipe.runtime.pipe import Pipe
else:
    _HOMES = {
        "AutopipeError": "autopipe.errors",
        "CaptureError": "autopipe.errors",
        "Formulas": "autopipe.formulas",
        "InfeasibleError": "autopipe.errors",
        "LaunchError": "autopipe.errors",
        "ModelError": "autopipe.errors",
        "Pipe": "autopipe.runtime.pipe",
        "Plan": "autopipe.plan",
        "PlanError": "autopipe.errors",
        "ScheduleError": "autopipe.errors",
        "SumCount": "autopipe.losses",
        "cost_formulas": "autopipe.formulas",
        "parallelize": "autopipe.parallel",
    }

    def _load(module: str, name: str) -> Any:
        from autopipe.garbage import loading

        with loading():
            return getattr(import_module(module), name)

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = _load(_HOMES[name], name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    class _Package(ModuleType):
        """This module: its `plan` is the function, though there is a module of that name too.

        The import system sets the module autopipe.plan as an attribute, whenever that is loaded.
        """

        @property
        def plan(self) -> Any:
            return _load("autopipe.planning", "plan")

        @plan.setter
        def plan(self, module: ModuleType) -> None:
            """Stays the function."""

    sys.modules[__name__].__class__ = _Package


__all__ = [
    "AutopipeError",
    "CaptureError",
    "Formulas",
    "InfeasibleError",
    "LaunchError",
    "ModelError",
    "Pipe",
    "Plan",
    "PlanError",
    "ScheduleError",
    "SumCount",
    "cost_formulas",
    "parallelize",
    "plan",
]
