"""autopipe: split a PyTorch model nobody prepared over the devices at hand, and run it.

plan = autopipe.plan(model, inputs, cluster="local:4")
pipe = autopipe.parallelize(model, plan)
loss = pipe.step(batch)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopipe.garbage import loading

with loading():
    from autopipe.errors import (
        AutopipeError,
        CaptureError,
        InfeasibleError,
        LaunchError,
        ModelError,
        PlanError,
        ScheduleError,
    )
    from autopipe.plan import Plan
    from autopipe.planning import plan

if TYPE_CHECKING:
    from autopipe.formulas import Formulas, cost_formulas
    from autopipe.losses import SumCount
    from autopipe.parallel import parallelize
    from autopipe.runtime.pipe import Pipe
else:
    _LATER = {
        "Formulas": "autopipe.formulas",
        "Pipe": "autopipe.runtime.pipe",
        "SumCount": "autopipe.losses",
        "cost_formulas": "autopipe.formulas",
        "parallelize": "autopipe.parallel",
    }

    def __getattr__(name: str) -> Any:
        """Load what nobody needs to plan when it is asked for."""
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LATER[name]), name)


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
