"""What the sampler beside a server costs: its share of one core at 1 Hz (`make bench`).

By its own count of CPU time in telemetry.csv, from its second sample on, and separately for its start. It runs as
in a measurement: below a process that has a server of several processes below it, on a machine with many others.
"""

import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

SECONDS, TIMES, OTHERS, SERVER = 30, 3, 500, 20
# As many idle processes as it is told; then, for the last argument, the sampler beside them.
FAMILY = """
import subprocess, sys
idle = [subprocess.Popen(["sleep", "3600"]) for _ in range(int(sys.argv[1]))]
print("up", flush=True)
beside = subprocess.Popen(sys.argv[2:]) if sys.argv[2:] else None
sys.stdin.read()
for process in [*idle, *([beside] if beside else [])]: process.kill()
"""


def family(count: int, *beside: str) -> subprocess.Popen:
    started = subprocess.Popen(
        [sys.executable, "-c", FAMILY, str(count), *beside], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    started.stdout.readline()
    return started


def end(started: subprocess.Popen) -> None:
    started.stdin.close()
    started.wait()
    started.stdout.close()


def measure(seconds: int) -> tuple[float, float]:
    """CPU seconds until the first sample, and the share of one core after it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "boots").mkdir()
        sampler = [sys.executable, "-P", "-m", "llmrepro.telemetry", folder, "1"]
        server = family(SERVER, *sampler)
        time.sleep(seconds + 2)
        end(server)
        with open(Path(folder) / "telemetry.csv", newline="") as file:
            rows = list(csv.DictReader(file))
    first, begun, last = rows[0], rows[1], rows[-1]
    used_s = float(last["sampler_cpu_s"]) - float(begun["sampler_cpu_s"])
    return float(first["sampler_cpu_s"]), used_s / ((int(last["t_ns"]) - int(begun["t_ns"])) / 1e9)


def main(seconds: int, times: int) -> None:
    others = family(OTHERS)
    try:
        found = []
        for _ in range(times):
            found.append(measure(seconds))
            print(f"sampler: start {found[-1][0]:.3f} s of CPU, then {found[-1][1]:.3%} of one core", flush=True)
    finally:
        end(others)
    shares = [share for _, share in found]
    print(
        f"sampler at 1 Hz over {seconds} s beside {SERVER} processes of a server and {OTHERS} others, median of "
        f"{times}: {median(shares):.3%} of one core ({min(shares):.3%} to {max(shares):.3%}), wanted under 1 %"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else SECONDS, int(sys.argv[2]) if len(sys.argv) > 2 else TIMES)
