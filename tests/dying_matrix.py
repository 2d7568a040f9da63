"""`llmrepro` whose matrix's cells are those of dying_cell.py, and have little time to die in."""

import sys
from pathlib import Path

from llmrepro import cell
from llmrepro.cli import main

cell.COMMAND = [sys.executable, "-P", str(Path(__file__).with_name("dying_cell.py")), "run"]
cell.LATE_S = 60.0  # a slow machine imports for 10 s and makes the page of what there is in as many
main(prog_name="llmrepro")
