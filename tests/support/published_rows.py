"""A made-up row of a table of published runs."""

from benchmarks.published.software import Row


def row(**changes: object) -> Row:
    """A made-up run: a small GPT on a node of 8, two stages, two tensor-parallel ranks."""
    known = {
        **{"run_id": "made-up-1", "table": "made_up_table1", "model": "GPT", "arch": "gpt"},
        **{"layers": 8, "hidden": 1024, "heads": 16, "vocab": 50304, "seq": 512},
        **{"gbs": 32, "mbs": 2, "tp": 2, "pp": 2, "schedule": "1F1B", "gpu": "A100-SXM4-80GB"},
        **{"n_gpus": 8, "gpus_per_node": 8, "precision": "bf16", "recompute": "none"},
        **{"step_time_s": 0.5, "status": "ok", "confidence": "read"},
    }
    return {name: str(value) for name, value in {**known, **changes}.items()}
