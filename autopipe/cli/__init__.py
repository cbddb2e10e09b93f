"""The command line: `autopipe init | trace | costs | plan | explain | simulate | run | ...`.

stdout is data, stderr is talk. Commands pass files to each other:

    autopipe init model.py
    autopipe plan model.py -o plan.json     ->  autopipe explain plan.json
                                            ->  autopipe simulate plan.json --svg step.svg
                                            ->  autopipe run plan.json --local 4
                                            ->  autopipe emit plan.json -o FOLDER

One file for each command. `--help` imports them all, so that what is slow to import, torch above
all, is imported inside the commands. A written train.py leans on the names below.
"""

from autopipe.cli.console import quiet, say, tell
from autopipe.cli.entry import main, program
from autopipe.cli.paths import check_folder
from autopipe.cli.run import report

__all__ = ["check_folder", "main", "program", "quiet", "report", "say", "tell"]
