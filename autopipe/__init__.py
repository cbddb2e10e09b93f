"""autopipe: split a PyTorch model nobody prepared over the devices at hand, and run it.

plan = autopipe.plan(model, inputs, cluster="local:4")
pipe = autopipe.parallelize(model, plan)
loss = pipe.step(batch)
"""

from autopipe.errors import (
    AutopipeError,
    CaptureError,
    InfeasibleError,
    LaunchError,
    ModelError,
    PlanError,
    ScheduleError,
)
from autopipe.parallel import parallelize
from autopipe.plan import Plan
from autopipe.planning import plan
from autopipe.runtime.pipe import Pipe

__all__ = [
    "AutopipeError",
    "CaptureError",
    "InfeasibleError",
    "LaunchError",
    "ModelError",
    "Pipe",
    "Plan",
    "PlanError",
    "ScheduleError",
    "parallelize",
    "plan",
]
