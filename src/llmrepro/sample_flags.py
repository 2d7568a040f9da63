"""What a reader must know of what was sampled: throttling, holes, errors of the GPU's driver, a guard's stop."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from llmrepro import samples
from llmrepro.cache_use import numbered
from llmrepro.notation import plural
from llmrepro.sample_rows import Beside


def of(run: Beside) -> list[str]:
    """Sentences; none of a run beside which nothing was sampled and nobody watched."""
    return [*_stops(run), *_xids(run), *_unwatched(run), *_throttling(run), *_missing(run), *_holes(run)]


def _stops(run: Beside) -> Iterator[str]:
    for n, guarded in run.guarded.items():
        if guarded.stop is not None:
            yield f"{numbered([n])}: the guard stopped the server: {guarded.stop.reason}"


def _xids(run: Beside) -> Iterator[str]:
    for n, guarded in run.guarded.items():
        for (number, gpu), times in Counter((x.number, x.gpu) for x in guarded.xids).items():
            where = "" if gpu is None else f" of GPU {gpu}"
            often = f", {times} times" if times > 1 else ""
            text = next(x.text for x in guarded.xids if (x.number, x.gpu) == (number, gpu))
            yield f"{numbered([n])}: the driver reported Xid {number}{where}{often}" + (
                f": {text}" if text else ""
            )


def _unwatched(run: Beside) -> Iterator[str]:
    """Only of runs with GPUs: the others have no driver to watch."""
    boots: dict[str, list[int]] = defaultdict(list)
    for n, guarded in run.guarded.items():
        if guarded.unwatched is not None and (guarded.gpus or run.recipe.needs.gpu_count):
            boots[guarded.unwatched].append(n)
    for why, mine in boots.items():
        yield f"{numbered(mine)}: errors of the GPU's driver (Xids) could not be watched: {why}"


def _throttling(run: Beside) -> Iterator[str]:
    """Of the samples taken during requests those in which the clocks of a GPU were held back, and why."""
    boots, taken, held, reasons = [], 0, 0, Counter()
    for n in run.samples:
        spans = samples.in_flight(run.asked(n))
        mine = [s for of_gpu in run.gpus(n).values() for s in samples.during(of_gpu, spans)]
        back = [s.throttle for s in mine if s.throttle]
        if back:
            boots.append(n)
            taken, held = taken + len(mine), held + len(back)
            reasons.update(word for words in back for word in set(words))
    if boots:
        why = ", ".join(f"{word} {count / taken:.0%}" for word, count in reasons.most_common())
        yield (
            f"{numbered(boots)}: the clocks of the GPU were held back in {held / taken:.0%} of "
            f"{plural(taken, 'sample')} taken during requests ({why})"
        )


def _missing(run: Beside) -> Iterator[str]:
    """Boots of which nothing was sampled, where something was of others or the sampler began."""
    sampled = bool(run.samples or run.guarded)
    without = [n for n, boot in run.boots.items() if n not in run.samples and not boot.get("external")]
    if sampled and without:
        yield f"{numbered(without)}: no telemetry; the sampler did not start, or ended at once"


def _holes(run: Beside) -> Iterator[str]:
    ended, holes = {}, {}
    for n, by_device in run.samples.items():
        spans = samples.in_flight(run.asked(n))
        if not spans or n not in run.boots:
            continue
        start_ns, end_ns = spans[0][0], spans[-1][1]
        of_device = max(by_device.values(), key=len)
        late_s = (end_ns - of_device[-1].t_ns) / 1e9
        if late_s > samples.HOLE_S:
            ended[n] = min(late_s, (end_ns - start_ns) / 1e9)
        elif (hole_s := samples.unseen_s(of_device, start_ns, end_ns)) > samples.HOLE_S:
            holes[n] = hole_s
    if ended:
        yield (
            f"{numbered(ended)}: telemetry ended before the requests did, by {_up_to(ended)}; means and peaks are "
            "of the time until then"
        )
    if holes:
        yield f"{numbered(holes)}: no telemetry for {_up_to(holes)} among the requests; means and peaks lack them"


def _up_to(seconds: dict[int, float]) -> str:
    return ("up to " if len(seconds) > 1 else "") + f"{max(seconds.values()):.0f} s"
