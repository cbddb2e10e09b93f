"""`autopipe report`: the page of a plan and of a recorded run, and what it says where it cannot."""

from pathlib import Path

from tests.support.shell import Shell


def test_a_plan_becomes_a_page_with_sliders(autopipe: Shell) -> None:
    autopipe.plan(2, "--pp", "2", "--batch", "8", "--micro-batches", "2")
    said = autopipe("report", "plan.json")
    assert (said.code, said.out) == (0, "plan.html\n")
    assert "open it in a browser" in said.err and "without sliders" not in said.err
    text = Path("plan.html").read_text()
    assert "<title>plan.json</title>" in text and '"sheets": [' in text


def test_without_its_model_a_page_has_no_sliders(autopipe: Shell) -> None:
    autopipe.plan(2, "--pp", "2")
    Path("net.py").rename("moved.py")
    said = autopipe("report", "plan.json", "-o", "page.html")
    assert (said.code, said.out) == (0, "page.html\n")
    assert "without sliders: plan.source: there is no model file 'net.py'" in said.err
    assert '"sheets": [' not in Path("page.html").read_text()
    refused = autopipe("report", "plan.json", "--model", "gone.py").error
    assert refused.startswith("there is no model file 'gone.py'")


def test_a_recorded_run_becomes_a_page(autopipe: Shell) -> None:
    autopipe.plan(1)
    ran = autopipe("run", "plan.json", "--steps", "3", "--record", "run1")
    assert ran.code == 0 and "`autopipe report run1` shows it" in ran.err
    assert sorted(path.name for path in Path("run1").iterdir()) == [
        "measured.json",
        "metrics.jsonl",
        "plan.json",
        "trace.json",
    ]
    said = autopipe("report", "run1", "--no-sliders")
    assert (said.code, said.out) == (0, "run1/report.html\n")
    text = Path("run1/report.html").read_text()
    assert "<h2>Loss</h2>" in text and "planned:" in text and "measured:" in text
    again = autopipe("run", "plan.json", "--steps", "3", "--record", "run1").error
    assert again.startswith("--record run1 has an earlier run")


def test_what_is_neither_a_plan_nor_a_run_is_refused(autopipe: Shell) -> None:
    assert autopipe("report", "gone.json").error.startswith("gone.json: no such file")
    Path("empty").mkdir()
    assert autopipe("report", "empty").error.startswith("empty has no plan.json")
    autopipe.plan(1)
    assert "there is no folder" in autopipe("report", "plan.json", "-o", "no/page.html").error
    assert "it is a folder" in autopipe("report", "plan.json", "-o", "empty").error
