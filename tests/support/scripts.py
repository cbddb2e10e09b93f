"""Shell scripts read by bash and by shellcheck, which both find what one overlooks."""

import subprocess
import sys
from pathlib import Path


def check_script(text: str) -> None:
    """bash parses it, and shellcheck has nothing to say, but of a $ that is to stay one."""
    parsed = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert parsed.returncode == 0, parsed.stderr
    shellcheck = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run(
        [shellcheck, "--shell=bash", "--exclude=SC2016", "-"],
        input=text,
        text=True,
        capture_output=True,
    )
    assert found.returncode == 0, found.stdout


def words_of(command: str) -> list[str]:
    """What bash makes of a command's words: they come back one a line, with their letters."""
    code = f"printf '%s\\0' {command}"
    out = subprocess.run(["bash", "-c", code], capture_output=True, check=True).stdout
    return out.decode().split("\0")[:-1]
