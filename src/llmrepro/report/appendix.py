"""The back of the report: the machine, the pins and the command, the methods, every request and answer."""

import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from llmrepro import __version__, intervals, metrics, readiness, terms
from llmrepro.findings import Findings
from llmrepro.markup import Html, code, facts, folded, join, table, tag
from llmrepro.model import Weights
from llmrepro.notation import number
from llmrepro.parameters import Parameters
from llmrepro.recipe import Needs
from llmrepro.report import exchanges
from llmrepro.report.sections import Section
from llmrepro.report.values import COLUMNS

NOT_REPEATED = frozenset({"recipe", "resume", "runs_dir"})  # where a run lies is not what it is
# What has no definition over one request; the others are told by the docstrings of `metrics`.
DEFINITIONS = {
    "prefill_tps.slope": "1 / the least-squares slope of TTFT over prompt tokens: fixed overhead, which "
    "every request pays once, is not in it. Its interval is that of the slope, turned over.",
    "startup.port_s": "From the start of the process until its port accepts a connection, asked every "
    f"{readiness.POLL_S * 1000:g} ms, as the next two are.",
    "startup.models_s": "From the start of the process until GET /v1/models answers 200.",
    "startup.health_s": "From the start of the process until the health path answers 200.",
    "startup.first_completion_s": "From the start of the process until the first completion's first token.",
    "power.busy_w": "The mean power of the GPU over the samples taken while a request was in flight, warm-ups "
    "left out; of several GPUs the sum of their means.",
    "temperature.core_c": "The highest of a boot, from its start to its end; over boots the mean of their peaks.",
    "temperature.memory_c": "The same of the GPU's memory.",
    "guard.stop_s": "From the first request of a boot that counts to the moment at which the guard stopped it.",
    "energy_j_per_token": "Energy from a workload's first request to its last token by a counter of the GPU, or "
    "of the CPU package where the recipe uses no GPU, over its output tokens. Prefill and pauses are in it.",
    "kv_bytes_per_token": "The size of the cache that the engine says it allocated, over the cells in it.",
}


def sections(found: Findings) -> Iterator[Section]:
    """The back parts in order."""
    if found.machine:
        yield Section(
            "machine",
            "Machine",
            "",
            facts(
                "The machine of this run, as it was found", [(k, number(v)) for k, v in _machine(found.machine)]
            ),
        )
    yield Section(
        "repeat", "Pins, and how to repeat it", "In a checkout of llmrepro, after `make setup`:", _repeat(found)
    )
    if found.result["metrics"]:
        yield Section("methods", "Methods", "", _methods(found))
    if found.records:
        yield Section(
            "requests",
            "Every request",
            "Failed ones too. Warm-ups are recorded and never counted.",
            join([exchanges.requests(found), exchanges.answers(found)]),
        )


def foot(found: Findings) -> Html:
    """Who made the page, and the hashes of what it was made from."""
    ran = found.machine.get("llmrepro")
    when = found.records[0].started_at if found.records else None
    said = [
        f"Rendered by llmrepro {__version__}",
        f"run by llmrepro {ran}" if ran else None,
        f"first request {_time(when)}" if when else None,
        f"status of {_time(found.status.get('at', 'unknown time'))}",
    ]
    inputs = [(name, tag("code", digest, class_="long")) for name, digest in found.result["inputs"].items()]
    return tag(
        "footer",
        tag("p", "; ".join(s for s in said if s), "."),
        folded("The files this page was made from", facts("sha256 of each", inputs)) if inputs else None,
    )


def _time(stamp: str) -> str:
    return re.sub(r"^(\S{10})T(\d\d:\d\d:\d\d)\S*\+00:00$", r"\1 \2 UTC", stamp)


def _machine(value: dict, path: str = "") -> Iterator[tuple[str, object]]:
    """machine.json as lines; what is not known says so."""
    for key, found in value.items():
        parts = f"{path} {key}".replace("_gb_s", "_GB/s").replace("_", " ").split()
        name = " ".join(_SPELT.get(part, part) for part in parts)
        if isinstance(found, dict):
            yield from _machine(found, name)
        elif isinstance(found, list) and found:  # of GPUs, of NUMA nodes
            for place, one in enumerate(found):
                yield from _machine(one if isinstance(one, dict) else {"": one}, f"{name} {place}")
        else:
            yield name, "unknown" if found is None else "none" if found == [] else found


_SPELT = {
    "cpu": "CPU",
    "cpus": "CPUs",
    "gpus": "GPUs",
    "l3": "L3 cache",
    "gib": "(GiB)",
    "mib": "(MiB)",
    "os": "system",
    "1min": "(1 minute)",
    "numa": "NUMA",
    "sm": "SM",
    "mhz": "(MHz)",
    "mts": "(MT/s)",
    "w": "(W)",
    "GB/s": "(GB/s)",
    "pcie": "PCIe",
    "cuda": "CUDA",
}


def shown(value: str) -> str:
    """A parameter's text; of a path of this machine only the file's name."""
    return Path(value).name if Path(value).is_absolute() else value


def command(found: Findings, without: frozenset[str] = NOT_REPEATED) -> str:
    """The command line that asks for the same run, with every parameter that is not the default."""
    words = ["llmrepro", "run", found.parameters.recipe]
    for name, value in found.parameters.model_dump().items():
        if name in without or value == Parameters.model_fields[name].default:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(shown(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return shlex.join(words)


def _weights(what: str, weights: Weights) -> Iterator[tuple[str, Html | str]]:
    revision = weights.revision or "at a revision that is not stated"
    yield what, f"{weights.repo} {revision}, from {weights.source}, {weights.format}"
    for file in weights.files:
        size = f"{file.bytes:,} B, " if file.bytes else ""
        digest = tag("code", file.sha256, class_="long") if file.sha256 else "not stated"
        yield file.path, join([f"{size}sha256 ", digest])


def _repeat(found: Findings) -> Html:
    recipe = found.recipe
    engine, model, source, made = recipe.engine, recipe.model, recipe.source, recipe.model.prepare
    pins = [
        ("engine", f"{engine.name} {engine.version}, from {engine.install.kind}"),
        *((f"package {n}", v) for n, v in engine.install.pins.items()),
        ("needs", "; ".join(_needs(recipe.needs))),
        ("fixes", ", ".join(f.name for f in engine.fixes) or "none"),
        *((f"checkout {c.name}", f"{c.repo} {c.commit}") for c in engine.install.checkouts),
        *([("image", engine.install.container.image)] if engine.install.container else []),
        *((f"not stated: {what}", choice) for what, choice in engine.unstated.items()),
        *_weights("weights", model),
        *(_weights("overlay", model.overlay) if model.overlay else []),
        *(_weights("drafter", model.draft) if model.draft else []),
        *([("prepared with", f"{' '.join(made.scripts)} of {made.repo} {made.commit}")] if made else []),
        ("licence of the weights", model.license or "not stated"),
        (
            "publication",
            join([source.publication, join([" ", _link(source.url)]) if source.url else ""])
            if source
            else "none is named",
        ),
    ]
    servers = [
        (
            s.id,
            tag("code", " ".join(s.args) or "no arguments", class_="long"),
            tag("code", " ".join(f"{k}={v}" for k, v in s.env.items()), class_="long") if s.env else "–",
            f"{s.boots:,}",
        )
        for s in recipe.servers
    ]
    asked = [
        (
            w.title or w.id,
            ", ".join(w.on),
            tag("code", w.endpoint),
            ", ".join(w.cases),
            f"{w.repeats:,}",
            f"{w.max_tokens:,}",
            ", ".join(f"{k} {number(v)}" for k, v in w.sampling.model_dump().items() if v not in (None, []))
            + (", end token ignored" if w.ignore_eos else "")
            + f", prompt cache {w.cache}",
        )
        for w in recipe.workloads
        if found.parameters.profile in w.profiles
    ]
    live = (
        join(
            [
                tag("p", "To measure it, on a machine that meets its needs:"),
                code(command(found, NOT_REPEATED | {"mode"})),
            ]
        )
        if found.parameters.mode == "published"
        else None
    )
    return join(
        [
            code(command(found)),
            live,
            facts("Pins", pins),
            table(
                "How the server is started; host, port and key are the kit's",
                ["Server", "Arguments", "Environment", "Boots"],
                servers,
                words=(1, 2),
            ),
            table(
                "What is asked",
                ["Workload", "Servers", "Endpoint", "Cases", "Rounds", "Output tokens", "Settings sent"],
                asked,
                words=(1, 2, 3, 6),
            ),
            folded("Installed in the engine's environment", code(found.freeze.strip()))
            if found.freeze.strip()
            else None,
        ]
    )


def _needs(needs: Needs) -> Iterator[str]:
    if needs.architectures:
        yield f"a CPU of {' or '.join(needs.architectures)}"
    for value, what in (
        (needs.vram_gib, "GPU memory"),
        (needs.memory_gib, "memory"),
        (needs.disk_gib, "free disk"),
    ):
        if value:
            yield f"{number(value)} GiB of {what}"
    if needs.compute_capability:
        yield f"compute capability {needs.compute_capability}"
    yield from (f"the command {c}" for c in needs.commands)
    yield f"about {number(needs.minutes)} minutes"


def _link(url: str) -> Html:
    return tag("a", url, href=url, rel="noreferrer noopener") if url.startswith("https://") else tag("span", url)


CACHE_RULES = {
    "prefix": "Prompt cache: a head is cut to its tokens by the server's own tokenizer and begins with digits "
    "that are new in every round, so a round begins uncached. Where a restart splits a round, the new server is "
    "first asked again what it had asked before, as warm-ups. A workload's hit rate is what the engine's own "
    "counters grew by, warm-ups and the requests that fill the cache included.",
    "restart": "Cold and warm: before a cold start the weights are put out of the page cache (fsync, then "
    "posix_fadvise), before a warm one they are read into it, and mincore says how much of them is there when "
    "the server is started. The prompt cache is a thing apart: a restart empties it in both cases. All "
    "requests of a round are the same.",
}


def _methods(found: Findings) -> Html:
    shown = dict.fromkeys(
        r["metric"] for r in found.result["metrics"] if r["case"] is None or r["metric"] in COLUMNS
    )
    terms_ = [
        join([tag("dt", terms.METRICS[m].title, " ", tag("code", m)), tag("dd", definition(m))])
        for m in shown
        if definition(m)
    ]
    rules = [
        "Clock: time.perf_counter_ns of the client, which runs beside the server; a request's zero is just "
        "before it is sent on a connection that is open already.",
        "Tokens are counted by the server, never from chunks; a rate that would need a guess is not given.",
        "A round asks every prompt once. A prompt's value is the mean over its rounds; a workload's value is "
        "its statistic over the prompts of a round, then the mean over rounds.",
        f"Intervals: two-sided {intervals.LEVEL:.0%} Student t intervals of the mean, over the rounds of one "
        "boot, or over the boots' means where there are several: what a start decides is drawn once a boot.",
        "Failed requests are in the table below and in no mean.",
    ]
    kinds = {w.kind for w in found.recipe.workloads if any(r.workload == w.id for r in found.asked)}
    rules += [rule for kind, rule in CACHE_RULES.items() if kind in kinds]
    return join(
        [tag("ul", *(tag("li", r) for r in rules)), tag("h3", "Definitions of what is shown"), tag("dl", *terms_)]
    )


def definition(metric: str) -> str | None:
    """A metric in a sentence or two: the docstring of the function that computes it, or the words above."""
    function = metrics.DEFINITIONS.get(metric)
    said = inspect.getdoc(function) if function else DEFINITIONS.get(metric)
    return " ".join(said.replace("`", "").split()) if said else None
