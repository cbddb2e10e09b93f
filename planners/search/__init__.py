"""A `Problem`  ->  an `Answer`: the best decision, its bound and alternatives; or why nothing fits.

In: a `planners.model.problem.Problem`. Out: an `Answer`, or an InfeasibleError that names the
smallest changes that would fit. Never found here: torch, and costs of its own: every planner is
scored by `planners.model`.

Other rooms use: `registry.PLANNERS`, `best.Answer`, `.Outdone`, `.with_other_degrees`,
`bound.bounds`, `dynamic.fastest`.

    configs, device_orders           the choices that the constraints leave
    bound, room_bound                bounds that rule out a config before its cuts are tried
    dynamic, descent                 the exact planner
    in_turns                         the exact planner for ranks that take turns at a stage
    exhaustive, uniform              its oracle, and the baseline
    registry                         the planners by name
    best                             the best of all configs                start reading here
    spare_room                       less is run again where a rank of several stages has room
    alternatives, reasons, relax     the words of an answer or a refusal
"""
