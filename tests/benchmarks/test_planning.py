"""What benchmarks/planning reads from the command's output; no test here times the command."""

from benchmarks.planning.__main__ import table
from benchmarks.planning.case import CASES, ROOT, phases


def test_phases_are_those_that_the_command_has_said() -> None:
    talk = "plan: pp=1\ntime: started 1.9 s, traced 4.5 s, costs 0.0 s\n"
    assert phases(talk) == {"started": 1.9, "traced": 4.5, "costs": 0.0}


def test_every_case_has_its_model_file() -> None:
    assert all((ROOT / case.model).is_file() for case in CASES.values())


def test_a_row_without_a_limit_leaves_its_column_empty() -> None:
    row = {"case": "gpt", "wall": 2.0, "limit": None, "cpu": 1.0, "rss_gib": 0.4, "load": 0.1}
    row |= {"phases": {"traced": 1.5}, "plan": "pp=1", "file_bytes": 10_000}
    assert table([row]).splitlines()[-1] == (
        "| gpt | 2.0 |  | 1.0 | 0.4 | 0.1 | traced 1.5 | pp=1 | 0.01 MB |"
    )
