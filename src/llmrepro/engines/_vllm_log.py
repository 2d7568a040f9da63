"""What a vLLM server's log tells: phases of its start, memory, and its windows of ten seconds.

Pure functions over the log's text. vLLM stamps its lines `MM-DD HH:MM:SS`, without a year and to the second,
and prints some durations to the hundredth. Wordings differ by version; each is named where it is read, and
what a version does not print is left out. They were read in the sources or logs of 0.14, 0.27.1 and 0.32 (GPU),
and from a real server for 0.32 on a CPU.
"""

import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

# `(EngineCore_DP0 pid=42) INFO 11-30 13:50:49 [core.py:133] text`; what stands before, such as another
# logger's prefix or a progress bar, is passed over.
_LINE = re.compile(
    r"(?:\(([\w+.-]{1,60})(?: [^()]{0,80})?\) )?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"(\d\d-\d\d \d\d:\d\d:\d\d) \[([^\]]{1,200})\] ?(.*)"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"
_SECONDS = f"(?P<s>{_NUMBER[1:-1]})"
_HALF_A_YEAR_S = 183 * 86400


class Line(NamedTuple):
    """One stamped line. `at_s` counts from the log's first stamp."""

    at_s: float
    process: str  # "APIServer", "EngineCore", "Worker_TP0"; "" where the version names none
    text: str


def lines(log: str) -> list[Line]:
    """The stamped lines that count for one server: of several workers only the one that says most, since each
    repeats the others."""
    said = list(_stamped(log))
    workers = Counter(line.process for line in said if line.process.startswith("Worker"))
    one = workers.most_common(1)[0][0] if workers else ""
    return [line for line in said if line.process == one or line.process not in workers]


def _stamped(log: str) -> Iterator[Line]:
    # Without a year, a leap day alone tells a leap year, and a step back of months is a New Year.
    year = 2024 if re.search(r" 02-29 \d\d:\d\d:\d\d \[", log) else 2023
    first = None
    for line in log.splitlines():
        match = _LINE.search(_COLOUR.sub("", line))
        if match is None:
            continue
        try:
            stamp = datetime.strptime(f"{year}-{match[2]}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            continue
        first = first or stamp
        at_s = (stamp - first).total_seconds()
        if at_s < -_HALF_A_YEAR_S:
            at_s += (datetime(year + 1, 1, 1) - datetime(year, 1, 1)).total_seconds()
        yield Line(at_s, match[1] or "", match[4])


# A phase whose line tells how long it took: it ends at that line.
_TOOK = [
    # "Model loading took 3.4 GiB memory and 2.5 seconds"; 0.27.1's V2 runner leaves out "memory".
    ("load model", re.compile(rf"Model loading took {_NUMBER} GiB(?: memory)? and {_SECONDS} seconds")),
    # On a CPU the weights alone are told.
    ("load weights", re.compile(rf"Loading weights took {_SECONDS} seconds")),
    # 0.14: "torch.compile takes 14.4 s in total"; from 0.2x "took", where one graph is made "and initial
    # profiling/warmup run together took", and 0.32 names the graph in front.
    ("torch.compile", re.compile(rf"torch\.compile (?:[a-z/ ]+ )?(?:takes|took) {_SECONDS} s in total")),
    ("profiling run", re.compile(rf"Initial profiling/warmup run took {_SECONDS} s")),
    ("capture graphs", re.compile(rf"Graph capturing finished in {_SECONDS} secs")),
    # 0.14: "took 90.84 seconds"; later "took 2.77 s", with "(compilation: 1.93 s)" where it compiled.
    ("init engine, in all", re.compile(rf"init engine \([^)]{{0,200}}\) took {_SECONDS} s")),
]
_ENGINE = re.compile(r"Initializing an? (?:V\d )?LLM engine \(v")
_LOADS = re.compile(r"Starting to load model")
_KV = re.compile(r"KV cache size: [\d,]+ tokens")
_SERVES = re.compile(r"Starting vLLM (?:API )?server")
_WARMS, _WARMED = re.compile("Warming up model for the compilation"), re.compile("Warming up done")
_BEFORE_KV = {"load model", "load weights", "torch.compile", "profiling run"}
_ROUTE = re.compile(r"Available routes are|Route: ")


def phases(log: str) -> list[tuple[str, float, float]]:
    """(name, start_s, end_s) in seconds after the log's first stamp, in the order of their starts.

    Stamps are whole seconds: a border taken from one may be a second off. A phase whose line prints its
    duration ends at that line and has that length; only its place is uncertain. "init engine, in all" encloses
    compilation, profiling, KV cache and graph capture. What runs before the first line (Python's imports)
    no line tells.
    """
    said = lines(log)
    found = [
        (name, round(max(0.0, line.at_s - float(match["s"])), 2), line.at_s)
        for line in said
        for name, pattern in _TOOK
        if (match := pattern.search(line.text))
    ]
    if any(name == "load model" for name, *_ in found):
        found = [phase for phase in found if phase[0] != "load weights"]  # the longer one holds it
    engine, loads, kv = (_at(said, pattern) for pattern in (_ENGINE, _LOADS, _KV))
    warms, warmed = _at(said, _WARMS), _at(said, _WARMED)
    made = [end for name, _, end in found if name in _BEFORE_KV and kv is not None and end <= kv]
    made += [warmed] if warmed is not None else []
    ready = next((end for name, _, end in found if name == "init engine, in all"), None)
    serves = [line.at_s for line in said if _SERVES.search(line.text) or _ROUTE.match(line.text)]
    found += [
        (name, start, end)
        for name, start, end in (
            ("read settings, spawn engine", 0.0, engine),
            ("start the worker", engine, loads),
            ("compile, warm up", warms, warmed),  # the words on a CPU, where torch.compile tells no time
            ("size and allocate KV cache", max(made, default=None), kv),
            ("start the API", ready, max(serves, default=None)),
        )
        if start is not None and end is not None and end >= start
    ]
    return sorted(found, key=lambda phase: (phase[1], -phase[2]))


def _at(said: list[Line], pattern: re.Pattern) -> float | None:
    return next((line.at_s for line in said if pattern.search(line.text)), None)


_MEMORY = {
    "memory.weights_gib": re.compile(rf"Model loading took {_NUMBER} GiB"),
    # GPU; on a CPU "Explicitly set (1.0/21.34) GiB for KV cache on node 0", or "Auto set (…)".
    "memory.kv_gib": re.compile(
        rf"Available KV cache memory: {_NUMBER} GiB|(?:Explicitly|Auto) set \({_NUMBER}/[\d.]+\) GiB for KV"
    ),
    "memory.graphs_gib": re.compile(rf"Graph capturing finished in [\d.]+ secs, took {_NUMBER} GiB"),
    "kv_tokens": re.compile(r"KV cache size: (\d[\d,]{0,20}) tokens"),
    # On a line of its own up to 0.27.1, behind the size since.
    "kv_concurrency": re.compile(rf"Maximum concurrency for [\d,]+ tokens per request: {_NUMBER}x"),
}


def memory(log: str) -> dict[str, float]:
    """{metric: value} as printed: GiB of weights, of KV cache and of captured graphs (of one worker),
    tokens that the KV cache holds, and how many requests of full length that is.

    The last line of a kind counts: the graphs are captured once more after a trial that sizes the cache. A CPU
    prints no weights and no graphs; they are left out.
    """
    found: dict[str, float] = {}
    for line in lines(log):
        for name, pattern in _MEMORY.items():
            if match := pattern.search(line.text):
                told = next(group for group in match.groups() if group).replace(",", "")
                found[name] = int(told) if name == "kv_tokens" else float(told)
    return found


_WINDOW = re.compile(r"(?:Engine (\d{1,6})|\d{1,6} Engines Aggregated): Avg prompt throughput: ")
_FIGURES = {  # name: (words before, words after, factor)
    "prompt_tps": (r"Avg prompt throughput: ", " tokens/s", 1),
    "generation_tps": (r"Avg generation throughput: ", " tokens/s", 1),
    "running": (r"Running: ", " reqs", 1),
    "waiting": (r"Waiting: ", " reqs", 1),
    "kv_usage": (r"KV cache usage: ", "%", 0.01),
    "prefix_hit_rate": (r"Prefix cache hit rate: ", "%", 0.01),
}
_SPECULATION = {
    "acceptance_length": (r"Mean acceptance length: ", "", 1),
    "acceptance": (r"[Dd]raft acceptance rate: ", "%", 0.01),
    "accepted_tps": (r"Accepted throughput: ", " tokens/s", 1),
    "drafted_tps": (r"Drafted throughput: ", " tokens/s", 1),
    "accepted_tokens": (r"Accepted: ", " tokens", 1),
    "drafted_tokens": (r"Drafted: ", " tokens", 1),
}


def rolling(log: str) -> list[dict]:
    """The log's windows, one dict each: `at_s` (end of the window, about ten seconds long), `engine`,
    `prompt_tps`, `generation_tps`, `running`, `waiting`, `kv_usage`, `prefix_hit_rate`; with speculation
    `acceptance_length` (the bonus token included), `acceptance`, `accepted_tps`, `drafted_tps`,
    `accepted_tokens`, `drafted_tokens` and `acceptance_by_position`. Rates of hits, usage and acceptance
    are shares from 0 to 1; what a window does not print is left out.

    Throughputs are means over a window that knows nothing of where a request began, and the hit rate is
    that of the last 1,000 requests: neither is comparable to a counter or to a request's own rate. Cached
    prompt tokens do not count as prompt throughput (0.32).
    """
    found: list[dict] = []
    for line in lines(log):
        if match := _WINDOW.match(line.text):
            found.append({"at_s": line.at_s, "engine": int(match[1] or 0), **_figures(line.text, _FIGURES)})
        elif line.text.startswith("SpecDecoding metrics: "):
            # It follows the window's own line; a version that prints it alone gets a window of its own.
            if not found or "acceptance_length" in found[-1] or found[-1]["at_s"] != line.at_s:
                found.append({"at_s": line.at_s})
            found[-1] |= _figures(line.text, _SPECULATION)
            if positions := re.search(r"Per-position acceptance rate: ([\d., ]+)", line.text):
                found[-1]["acceptance_by_position"] = [
                    float(share) for share in re.findall(r"\d+\.\d+|\d+", positions[1])
                ]
    return found


def _figures(text: str, known: dict[str, tuple[str, str, float]]) -> dict[str, float]:
    found = {}
    for name, (before, after, factor) in known.items():
        if match := re.search(before + _NUMBER + re.escape(after), text):
            found[name] = round(float(match[1]) * factor, 6)
    return found
