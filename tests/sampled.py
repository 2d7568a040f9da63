"""telemetry.csv and guard files as the sampler beside a server writes them, and what was asked meanwhile."""

import json
from pathlib import Path

from folders import boot, record

HEAD = (
    "t_ns,boot,device,busy,memory_gib,free_gib,page_cache_gib,steal_share,temperature_c,memory_temperature_c,"
    "power_w,power_limit_w,energy_j,sm_clock_mhz,memory_clock_mhz,pcie_generation,pcie_width,throttle,server_cpus,"
    "server_gib,disk_free_gib,sampler_cpu_s"
)
START_NS = 5_000_000_000_000  # of the first boot: the clock began long before


def ns(seconds: float) -> int:
    """A moment, in seconds after the first boot's start."""
    return START_NS + round(seconds * 1e9)


def host(at_s: float, n: int = 1, **cells) -> dict:
    usual = {"busy": 1.5, "server_cpus": 1.2, "server_gib": 0.4, "page_cache_gib": 3.0, "steal_share": 0.0}
    return {"t_ns": ns(at_s), "boot": n, "device": "host", **usual, **cells}


def gpu(at_s: float, n: int = 1, index: int = 0, **cells) -> dict:
    usual = {"temperature_c": 70.0, "memory_temperature_c": 78.0, "power_w": 175.0, "power_limit_w": 180.0}
    usual |= {"busy": 0.98, "sm_clock_mhz": 1200.0, "energy_j": 1000.0 + 175.0 * at_s}
    return {"t_ns": ns(at_s), "boot": n, "device": f"gpu{index}", **usual, **cells}


def write(run_path: Path, rows: list[dict], torn: str = "") -> None:
    lines = [HEAD, *(",".join(_cell(row.get(name)) for name in HEAD.split(",")) for row in rows)]
    (run_path / "telemetry.csv").write_text("\n".join(lines) + "\n" + torn)


def _cell(value) -> str:
    return "" if value is None else str(value)


def guard(run_path: Path, n: int, *lines: dict, gpus=(0,), xids: str = "nvml", core_c=None) -> None:
    limits = {"core_c": core_c, "memory_c": None}
    watch = {"kind": "watch", "at": "", "t_ns": ns(0), "limits": limits, "gpus": list(gpus), "xids": xids}
    text = "".join(json.dumps(line) + "\n" for line in (watch, *lines))
    (run_path / "boots" / f"{n}.guard.jsonl").write_text(text)


def asked(at_s: float, *, tokens: int = 48, took_s: float = 1.0, **changes):
    """A request sent at a moment whose last token comes took_s later."""
    tps = (tokens - 1) / (took_s - 0.1)
    return record(t_send_ns=ns(at_s), ttft_s=0.1, tps=tps, n=tokens, **changes)


def started(at_s: float = 0.0, **changes) -> dict:
    return boot(started_at_ns=ns(at_s), **changes)
