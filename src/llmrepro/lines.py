"""Files that grow by whole lines: what a kill left of one is none."""

import os
from typing import BinaryIO


def drop_torn(file: BinaryIO) -> None:
    """Cut off what stands behind the last line break, and go to the end. The file is open for reading as well."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(size - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
