"""The back of the report: the machine, the pins and the command, the methods, every request and answer."""

import inspect
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator

from llmrepro import __version__, intervals, metrics, server, terms
from llmrepro.client import Record
from llmrepro.findings import Findings
from llmrepro.markup import Html, code, facts, folded, is_hash, join, table, tag
from llmrepro.notation import number, plural
from llmrepro.run import Parameters
from llmrepro.sections import COLUMNS, Section

MOST_ROWS, MOST_CHARACTERS, MOST_OF_ONE = 3000, 300_000, 20_000     # beyond these the page points at records.jsonl
NOT_REPEATED = {"recipe", "resume", "runs_dir"}                    # where a run lies is not what it is
# What has no definition over one request; the others are told by the docstrings of `metrics`.
DEFINITIONS = {
    "prefill_tps.slope": "1 / the least-squares slope of TTFT over prompt tokens: fixed overhead, which every request "
                         "pays once, is not in it. Its interval is that of the slope, turned over.",
    "startup.port_s": "From the start of the process until its port accepts a connection, asked every "
                      f"{server.POLL_S * 1000:g} ms, as the next two are.",
    "startup.models_s": "From the start of the process until GET /v1/models answers 200.",
    "startup.health_s": "From the start of the process until the health path answers 200.",
    "startup.first_completion_s": "From the start of the process until the first token of the first completion.",
    "kv_bytes_per_token": "The size of the cache that the engine says it allocated, over the cells in it.",
}


def sections(found: Findings) -> Iterator[Section]:
    """The back parts in order."""
    if found.machine:
        yield Section("machine", "Machine", "", facts("The machine of this run, as it was found",
                                                      [(k, number(v)) for k, v in _machine(found.machine)]))
    yield Section("repeat", "Pins, and how to repeat it", "In a checkout of llmrepro, after `make setup`:", _repeat(found))
    if found.result["metrics"]:
        yield Section("methods", "Methods", "", _methods(found))
    if found.records:
        yield Section("requests", "Every request", "Failed ones too. Warm-ups are recorded and never counted.",
                      join([_requests(found), _answers(found)]))


def foot(found: Findings) -> Html:
    """Who made the page, and the hashes of what it was made from."""
    ran = found.machine.get("llmrepro")
    when = found.records[0].started_at if found.records else None
    said = [f"Rendered by llmrepro {__version__}", f"run by llmrepro {ran}" if ran else None,
            f"first request {_time(when)}" if when else None, f"status of {_time(found.status.get('at', 'unknown time'))}"]
    inputs = [(name, tag("code", digest, class_="long")) for name, digest in found.result["inputs"].items()]
    return tag("footer", tag("p", "; ".join(s for s in said if s), "."),
               folded("The files this page was made from", facts("sha256 of each", inputs)) if inputs else None)


def _time(stamp: str) -> str:
    return re.sub(r"^(\S{10})T(\d\d:\d\d:\d\d)\S*\+00:00$", r"\1 \2 UTC", stamp)


def _machine(value: dict, path: str = "") -> Iterator[tuple[str, object]]:
    """machine.json as lines; what is not known says so."""
    for key, found in value.items():
        name = " ".join(_SPELT.get(part, part) for part in f"{path} {key}".replace("_", " ").split())
        if isinstance(found, dict):
            yield from _machine(found, name)
        else:
            yield name, "unknown" if found is None else found if isinstance(found, str | int | float) else json.dumps(found)


_SPELT = {"cpu": "CPU", "cpus": "CPUs", "gpus": "GPUs", "l3": "L3 cache", "gib": "(GiB)", "mib": "(MiB)", "os": "system",
          "1min": "(1 minute)"}


# ---- pins and the command ---------------------------------------------------------------------------------

def command(found: Findings) -> str:
    """The command line that asks for the same run, with every parameter that is not the default."""
    words = ["llmrepro", "run", str(found.parameters.get("recipe", found.recipe.id))]
    for name, value in found.parameters.items():
        field = Parameters.model_fields.get(name)
        if field is None or name in NOT_REPEATED or value == field.default:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return shlex.join(words)


def _repeat(found: Findings) -> Html:
    recipe = found.recipe
    engine, model, source = recipe.engine, recipe.model, recipe.source
    pins = [("engine", f"{engine.name} {engine.version}, from {engine.install.kind}"),
            *((f"package {n}", v) for n, v in engine.install.pins.items()),
            ("fixes", ", ".join(engine.fixes) or "none"),
            ("weights", f"{model.repo} {model.revision}, from {model.source}, {model.format}"),
            *((f.path, join([f"{f.bytes:,} B, sha256 ", tag("code", f.sha256, class_="long")])) for f in model.files),
            ("licence of the weights", model.license or "not stated"),
            ("publication", join([source.publication, join([" ", _link(source.url)]) if source.url else ""])
             if source else "none: a recipe of this kit")]
    servers = [(s.id, tag("code", " ".join(s.args) or "no arguments", class_="long"),
                tag("code", " ".join(f"{k}={v}" for k, v in s.env.items()), class_="long") if s.env else "–", f"{s.boots:,}")
               for s in recipe.servers]
    asked = [(w.title or w.id, ", ".join(w.on), tag("code", w.endpoint), ", ".join(w.cases), f"{w.repeats:,}",
              f"{w.max_tokens:,}", ", ".join(f"{k} {number(v)}" for k, v in w.sampling.model_dump().items()
                                             if v is not None) + (", end token ignored" if w.ignore_eos else "")
              + f", prompt cache {w.cache}") for w in recipe.workloads]
    return join([
        code(command(found)), facts("Pins", pins),
        table("How the server is started; host, port and key are the kit's", ["Server", "Arguments", "Environment", "Boots"],
              servers, words=(1, 2)),
        table("What is asked", ["Workload", "Servers", "Endpoint", "Cases", "Rounds", "Output tokens", "Settings sent"],
              asked, words=(1, 2, 3, 6)),
        folded("Installed in the engine's environment", code(found.freeze.strip())) if found.freeze.strip() else None,
    ])


def _link(url: str) -> Html:
    return tag("a", url, href=url, rel="noreferrer noopener") if url.startswith("https://") else tag("span", url)


# ---- methods ----------------------------------------------------------------------------------------------

def _methods(found: Findings) -> Html:
    shown = dict.fromkeys(r["metric"] for r in found.result["metrics"] if r["case"] is None or r["metric"] in COLUMNS)
    terms_ = [join([tag("dt", terms.METRICS[m].title, " ", tag("code", m)), tag("dd", definition(m))])
              for m in shown if definition(m)]
    rules = [
        "Clock: time.perf_counter_ns of the client, which runs beside the server; a request's zero is just before it is "
        "sent on a connection that is open already.",
        "Tokens are counted by the server, never from chunks; a rate that would need a guess is not given.",
        "A round asks every prompt once. A prompt's value is the mean over its rounds; a workload's value is its "
        "statistic over the prompts of a round, then the mean over rounds.",
        f"Intervals: two-sided {intervals.LEVEL:.0%} Student t intervals of the mean, over the rounds of one boot, or over "
        "the boots' means where there are several, for what a start decides is drawn once a boot.",
        "Failed requests are in the table below and in no mean.",
    ]
    return join([tag("ul", *(tag("li", r) for r in rules)), tag("h3", "Definitions of what is shown"), tag("dl", *terms_)])


def definition(metric: str) -> str | None:
    """A metric in a sentence or two: the docstring of the function that computes it, or the words above."""
    function = metrics.DEFINITIONS.get(metric)
    said = inspect.getdoc(function) if function else DEFINITIONS.get(metric)
    return " ".join(said.replace("`", "").split()) if said else None


# ---- requests and answers ---------------------------------------------------------------------------------

def _requests(found: Findings) -> Html:
    records = found.records[:MOST_ROWS]
    rows = [(tag("a", f"{n}", href=f"#request-{n}"), r.server, f"{r.boot}", r.workload, r.case,
             "warm-up" if r.warmup else f"{r.repeat + 1}", _status(r), number(r.prompt_tokens), number(r.cached_tokens),
             number(r.output_tokens), number(metrics.ttft_s(r)), number(metrics.decode_tps(r)), r.finish_reason or "–",
             tag("span", "; ".join([*([r.error] if r.error else []), *r.notes]), class_="wide") if r.error or r.notes else "–")
            for n, r in enumerate(records, 1)]
    left = len(found.records) - len(records)
    return folded(
        f"{plural(len(found.records), 'request')}, {plural(sum(r.warmup for r in found.records), 'warm-up')} among them",
        table("Requests in the order in which they were sent; “unknown” is a dash",
              ["Request", "Server", "Boot", "Workload", "Case", "Round", "Status", "Prompt tokens", "Cached", "Output tokens",
               "TTFT, s", "Decode, tok/s", "Finish", "Error and notes"], rows, words=(1, 3, 4, 6, 12, 13),
              ids=[f"request-{n}" for n in range(1, len(records) + 1)]),
        tag("p", f"{left:,} more are in records.jsonl.") if left else None)


def _status(record: Record) -> Html:
    look = ("✓", "good") if record.status == "ok" else ("!", "open") if record.status == "early_stop" else ("✗", "bad")
    return tag("span", tag("span", f"{look[0]} ", aria_hidden="true"), record.status.replace("_", " "),
               class_=f"word {look[1]}")


def _answers(found: Findings) -> Html:
    """The distinct answers to each case. Greedy ones should not differ between rounds; where they do, it is seen."""
    groups: dict[tuple, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
    prompts: dict[tuple, set[str]] = defaultdict(set)
    for n, r in enumerate(found.records, 1):
        if not r.warmup and (r.text or r.reasoning):
            groups[r.server, r.workload, r.case][r.reasoning, r.text].append(n)
            prompts[r.server, r.workload, r.case].add(r.prompt_sha256)
    several = len({by for by, _, _ in groups}) > 1
    room, parts = MOST_CHARACTERS, []
    for key, answers in groups.items():
        by, workload, case = key
        texts = [found.prompts[h] for h in prompts[key] if h in found.prompts]
        shown = [join([tag("h4", "Asked"), _text(texts[0])])] if len(prompts[key]) == 1 and texts else []
        for (reasoning, text), numbers in answers.items():
            taken = _clipped(text, min(room, MOST_OF_ONE))
            room = max(0, room - len(taken))
            shown.append(join([tag("h4", "Answered in ", _numbers(numbers)),
                               folded("reasoning", _text(_clipped(reasoning, MOST_OF_ONE))) if reasoning else None,
                               _text(taken)]))
        asked = sum(map(len, answers.values()))
        parts.append(folded(join([f"{workload} · {case}", f" · {by}" if several else "",
                                  f": {plural(len(answers), 'distinct answer')} to {plural(asked, 'request')}"]), *shown))
    return join([tag("h3", "Prompts and answers"), *parts]) if parts else Html()


def _numbers(numbers: Iterable[int]) -> Html:
    return join([tag("a", f"{n}", href=f"#request-{n}") for n in numbers], ", ")


def _text(text: str) -> Html:
    return tag("pre", tag("code", text), class_="wrap", tabindex="0")


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}\n[{len(text) - most:,} more characters are in records.jsonl]"
