"""How far one publication moves: the same requests under each statistic, for every suite of imported numbers."""

from llmrepro.charts.drawings import COLOURS, Drawing, handles, legend, look, sheet
from llmrepro.imported import Imported
from llmrepro.notation import beside
from llmrepro.pairing import of_suite
from llmrepro.receipt_results import LABEL, PER_SUITE
from llmrepro.terms import METRICS, STATISTICS

TITLE = f"Decode speed under other statistics ({LABEL})"
MOST = 20  # suites that fit on a page


def averages(found: Imported, name: str) -> Drawing | None:
    """A band per suite: its prompts' means, and what each statistic makes of them; None without a speed."""
    bands = {}
    for suite, workload in list(found.told["suites"].items())[:MOST]:
        if values := found.of_suite(PER_SUITE[0], workload):
            bands[suite] = (_prompts(found, workload), values)
    if not bands:
        return None
    figure, (axes,) = sheet(f"{found.told['file']}, {LABEL}, not measured here", [1.5 + 0.75 * len(bands)])
    statistics = of_suite(PER_SUITE[0])
    for place, (prompts, values) in enumerate(bands.values()):
        axes.plot(
            list(prompts.values()), [place + 0.3] * len(prompts), "o", color=COLOURS[4], alpha=0.6, markersize=5
        )
        for which, statistic in enumerate(statistics):
            height = place - 0.33 + 0.15 * which  # one below the other: equal values hide none
            axes.plot(
                values[statistic], height, markersize=7, markeredgecolor="white", linestyle="", **look(which)
            )
    axes.set(
        title=TITLE,
        xlabel=f"{METRICS[PER_SUITE[0]].title} (tok/s)",
        yticks=range(len(bands)),
        yticklabels=list(bands),
        ylim=(len(bands) - 0.5, -0.6),
    )
    axes.grid(visible=False, axis="y")
    greatest = max(v for prompts, values in bands.values() for v in (*prompts.values(), *values.values()))
    axes.set_xlim(0, greatest * 1.06)
    legend(figure, handles([STATISTICS[s] for s in statistics]), 2)
    return Drawing(name, TITLE, _caption(len(found.told["suites"])), _alt(bands), figure, _data(bands))


def _prompts(found: Imported, workload: str) -> dict[str, float]:
    return {
        r["case"]: r["value"]
        for r in found.result["metrics"]
        if (r["metric"], r["workload"]) == (PER_SUITE[0], workload) and r["case"] is not None
    }


def _data(bands: dict) -> list[dict]:
    rows = []
    for suite, (prompts, values) in bands.items():
        rows += [(suite, "mean", case, value) for case, value in prompts.items()]
        rows += [(suite, statistic, None, value) for statistic, value in values.items()]
    return [
        {"label": LABEL, "suite": suite, "statistic": statistic, "case": case, "decode_tps": value}
        for suite, statistic, case, value in rows
    ]


def _caption(suites: int) -> str:
    more = f" {suites - MOST:,} more suites are in the table." if suites > MOST else ""
    return (
        f"Everything shown is {LABEL} and was not measured here. Grey: each prompt's mean over its requests. "
        "Coloured: what each statistic makes of the same requests; which of them a publication gives decides its "
        f"headline.{more}"
    )


def _alt(bands: dict) -> str:
    told = []
    for suite, (prompts, values) in bands.items():
        texts = beside(list(values.values()))
        said = ", ".join(f"{STATISTICS[s]} {text}" for s, text in zip(values, texts, strict=True))
        told.append(f"{suite}: {said}, over {len(prompts):,} prompts")
    return f"Chart of {LABEL} decode speeds in tokens per second under several statistics. {'; '.join(told)}."
