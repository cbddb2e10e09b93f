"""autopipe: split an unmodified PyTorch model over several devices, and train it there.

plan = autopipe.plan(model, inputs, cluster="cpu:4")
pipe = autopipe.parallelize(model, plan)
loss = pipe.step(batch)

Submodules are imported on first use: reading and drawing a plan needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.errors import (
        AutopipeError,
        CaptureError,
        CheckpointError,
        InfeasibleError,
        LaunchError,
        ModelError,
        PlanError,
        ScheduleError,
    )
    from autopipe.frontend.loss import SumCount
    from autopipe.onnx_files.module import from_onnx
    from autopipe.planfile.contents import Plan
    from autopipe.planners.driver.make_plan import plan
    from autopipe.planners.formulas.model_costs import Formulas, cost_formulas
    from autopipe.runtime.parallelize import parallelize
    from autopipe.runtime.step.pipe import Pipe
else:
    _HOMES = {
        "AutopipeError": "autopipe.errors",
        "CaptureError": "autopipe.errors",
        "CheckpointError": "autopipe.errors",
        "Formulas": "autopipe.planners.formulas.model_costs",
        "InfeasibleError": "autopipe.errors",
        "LaunchError": "autopipe.errors",
        "ModelError": "autopipe.errors",
        "Pipe": "autopipe.runtime.step.pipe",
        "Plan": "autopipe.planfile.contents",
        "PlanError": "autopipe.errors",
        "ScheduleError": "autopipe.errors",
        "SumCount": "autopipe.frontend.loss",
        "cost_formulas": "autopipe.planners.formulas.model_costs",
        "from_onnx": "autopipe.onnx_files.module",
        "plan": "autopipe.planners.driver.make_plan",
        "parallelize": "autopipe.runtime.parallelize",
    }

    def _load(module: str, name: str) -> Any:
        from autopipe.util.gc_pause import loading

        with loading():
            return getattr(import_module(module), name)

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = _load(_HOMES[name], name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "AutopipeError",
    "CaptureError",
    "CheckpointError",
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
    "from_onnx",
    "parallelize",
    "plan",
]
