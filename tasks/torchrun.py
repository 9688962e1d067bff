"""torchrun as the main job starts it: after a failure it leaves one line instead of a traceback.

`python tasks/torchrun.py FILE ...` takes torchrun's arguments and writes the line to FILE, and
`noxfile.py -s train` ends with it: what the first rank that failed had to say.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

SETTINGS = 2  # the exit code of ranks that were given impossible settings, and have said so


def start(file: Path, arguments: list[str]) -> int:
    """Run torchrun and return the exit code of the first rank that failed, or 0."""
    logging.disable(logging.ERROR)  # which process got which signal, in ten lines
    try:
        main(arguments)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode != SETTINGS:
            told = failure.message  # a table, where the rank could write one
            said = told["message"] if isinstance(told, dict) else f"exit code {failure.exitcode}"
            file.write_text(f"rank {rank}: {said.partition(chr(10))[0]}")
        return int(failure.exitcode) or 1
    except SignalException:  # Ctrl-C: the ranks say what they have saved
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(start(Path(sys.argv[1]), sys.argv[2:]))
