"""A rank without torch: a real watchdog with a real sidecar, there in a tenth of a second.

    python -S guarded.py FOLDER RANK SIZE NODE LOCAL_RANK HOST CODE

runs CODE under a watchdog; a folder is the store that the ranks share.
"""

import os
import sys
import time
from importlib import import_module
from pathlib import Path


class Folder:
    """A store as torch's, as far as a watchdog needs one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self, key: str, value: str) -> None:
        file = self._path / key.replace("/", ".")
        file.with_suffix(".part").write_text(value)
        file.with_suffix(".part").rename(file)

    def get(self, key: str) -> bytes:
        file = self._path / key.replace("/", ".")
        while not file.exists():
            time.sleep(0.01)
        return file.read_bytes()


def main() -> None:
    folder, rank, size, node, local_rank, host, code = sys.argv[1:]
    sys.path.append(str(Path(__file__).parents[2]))
    watchdog = import_module("autopipe.runtime.launch.watchdog")
    schedule = import_module("autopipe.schedules.instructions")
    ranks = {"rank": int(rank), "size": int(size), "node": int(node), "local_rank": int(local_rank)}
    with watchdog.watch(Folder(Path(folder)), host=host, **ranks) as dog:
        watch = dog.learn([schedule.parse(f"{rank}F5")])
        with dog.at(7):
            watch(0)
            (Path(folder) / f"{rank}.pid").write_text(str(os.getpid()))
            while len(list(Path(folder).glob("*.pid"))) < int(size):
                time.sleep(0.01)
            exec(code)


if __name__ == "__main__":
    main()
