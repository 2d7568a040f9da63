"""The sampler as it is, beside a GPU that is a stand-in: for tests of what the guard does to a server.

Of the run folder it reads what to play: a file `hot` makes the GPU 84 °C warm, a file `xid` holds the number of an
error that it has.
"""

import os
import sys
import threading
import time
from pathlib import Path

from nvml import Card, Library

from llmrepro import telemetry


class Plain:
    setattr = staticmethod(setattr)


def play(folder: Path, library: Library) -> None:
    (card,) = library.cards
    while True:
        if (folder / "hot").exists():
            card.core_c = 84
        if (folder / "xid").exists():
            number = int((folder / "xid").read_text())
            (folder / "xid").unlink()
            library.happens(card, number)
        time.sleep(0.01)


if __name__ == "__main__":
    telemetry.PERIOD_S = 0.05
    library = Library(Plain, [Card()])
    threading.Thread(target=play, args=(Path(sys.argv[1]), library), daemon=True).start()
    os._exit(telemetry.main(sys.argv[1:]))
