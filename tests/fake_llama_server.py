"""llama-server's command line and answers, as far as the tests of containers need them: the scripted engine."""

import os
import sys
from pathlib import Path

HELP = """\
-m,    --model FNAME                    model path to load
-a,    --alias STRING                   set alias for model name
       --host HOST                      ip address to listen
       --port PORT                      port to listen
-c,    --ctx-size N                     size of the prompt context
-t,    --threads N                      number of CPU threads
       --mlock                          force system to keep model in RAM
"""

if __name__ == "__main__":
    if "--help" in sys.argv:
        print(HELP)
        sys.exit(0)
    marker, stubborn = sys.argv[1], os.environ.get("LLAMA_TEST_STUBBORN") == "1"
    port = sys.argv[sys.argv.index("--port") + 1]
    print("environment:", " ".join(sorted(os.environ)), flush=True)
    fake = [sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_engine.py")), "--marker", marker]
    fake += ["--port", port, "--key", os.environ["LLAMA_API_KEY"], *(["--stubborn"] if stubborn else [])]
    os.execv(fake[0], fake)
