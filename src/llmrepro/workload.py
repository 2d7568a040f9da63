"""Workloads: which prompts are asked of which servers, in which order, and how an answer is sampled."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from llmrepro import terms
from llmrepro.parts import GitFile, Name, Part, RelativePath, Sha256

# The cases of the workloads whose requests are one another's history, in the order in which a round asks them.
AFTER_FILL = ("newest_after_fill", "oldest_after_fill")
CASES = {
    "prefix": ("uncached", "new_tail", "new_tail_2", "changed_head", "original_again", *AFTER_FILL),
    "restart": ("first", "second", "restarted", "restored"),
}
TAILS = {"prefix": 3, "restart": 1}


class Piece(GitFile):
    """A stretch of a publication's prompt: a literal of a Python file, or a slice of a text in characters.

    `literal` is an address: NAME, NAME[0][1] (of an assignment at the top of the file), or name()[0], the first
    text constant in the body of a function. The file is read and never run.
    """

    literal: str | None = Field(None, pattern=r"^[A-Za-z_]\w*(\(\))?(\[\d{1,6}\])*$", max_length=200)
    slice: tuple[int, int] | None = None


class PromptSource(Part):
    """A publication's own prompt, its pieces joined: fetched at run time, never committed."""

    pieces: list[Piece] = Field(min_length=1)
    sha256: Sha256 | None = Field(None, description="Of the UTF-8 text; None: not published, its commit pins it.")
    prompt_tokens: int | None = Field(
        None, gt=0, le=10**9, description="As the publication's server counted them."
    )


class Prompt(Part):
    """A prompt: the publication's own where it can be had, else a text of ours, and then `prompt` differs."""

    id: Name
    file: RelativePath = Field(description="A text file of ours, in the recipe's folder or its model's.")
    sha256: Sha256 = Field(description="Of that text.")
    source: PromptSource | None = None


class Sampling(Part):
    """Every field is sent: a server's own defaults (generation_config) must not decide."""

    temperature: float = Field(0.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=10**6)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = 0
    seeds: list[int] = Field([], description="One per round, in place of `seed`.")


class Workload(Part):
    id: Name
    kind: terms.WorkloadKind
    title: str = ""
    on: list[Name] = Field(min_length=1, description="Server ids it is asked of.")
    profiles: list[terms.Profile] = ["quick", "full"]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"] = "/v1/chat/completions"
    prompts: list[Prompt] = []
    lengths: list[Annotated[int, Field(ge=8, le=10**9)]] = Field(
        [], description="Prompt tokens, for `prefill` and `ladder`."
    )
    up_to: int | None = Field(
        None, ge=128, le=10**9, description="For `ladder` in place of `lengths`: doubled from 128 up to this."
    )
    streams: list[Annotated[int, Field(ge=1, le=256)]] = Field(
        [], description="For `concurrency`: how many requests are sent at once, a case each."
    )
    risky: bool = Field(
        False,
        description="For `chat` whose prompts rise in length: it may kill the engine, so it is asked as a ladder "
        "is: last, and no further than the first prompt that fails.",
    )
    text: Prompt | None = Field(
        None, description="What long prompts are cut from; for `prefix` and `restart`, their heads."
    )
    head_tokens: int | None = Field(
        None, ge=32, le=10**9, description="Tokens of the head, for `prefix` and `restart`."
    )
    fill: int = Field(0, ge=0, le=1000, description="For `prefix`: other heads asked to make the cache overflow.")
    restore: bool = Field(False, description="For `restart`: a case with the prompt cache saved and restored.")
    salted: bool = Field(False, description="For `chat`: a line of its own before the prompt of every request.")
    max_tokens: int = Field(gt=0, le=10**9)
    ignore_eos: bool = False
    thinking: bool | None = Field(None, description="Sent to the chat template; None: the template's default.")
    cache: Literal["off", "on"] = Field("off", description="off: no prompt may be served from a prefix cache.")
    sampling: Sampling = Sampling()
    repeats: int = Field(3, ge=1, le=10_000, description="Rounds: each asks every case once.")
    warmup: Prompt
    protocol: Literal["rounds", "prompt_by_prompt"] = Field(
        "rounds", description="rounds: each asks every case once; prompt_by_prompt: a case's repeats in a row."
    )

    @model_validator(mode="after")
    def _fits_kind(self):
        if self.kind == "chat" and not self.prompts:
            raise ValueError("a chat workload needs `prompts`")
        if self.kind == "prefill" and (not self.lengths or self.text is None):
            raise ValueError("a prefill workload needs `lengths` and `text`")
        if self.kind == "ladder" and (bool(self.lengths) == (self.up_to is not None) or self.text is None):
            raise ValueError("a ladder needs `text`, and either `lengths` or `up_to`")
        if self.kind == "ladder" and sorted(set(self.lengths)) != self.lengths:
            raise ValueError(f"the lengths of a ladder rise from rung to rung, found {self.lengths}; sort them")
        if self.kind == "concurrency" and (not self.prompts or not self.streams):
            raise ValueError("a concurrency workload needs `prompts` and `streams`")
        if len(set(self.streams)) < len(self.streams):
            raise ValueError(f"a number of `streams` stands twice in {self.streams}; leave one out")
        if self.kind in CASES:
            tails = TAILS[self.kind]
            if self.text is None or self.head_tokens is None or len(self.prompts) < tails:
                raise ValueError(
                    f"a {self.kind} workload needs `text` and `head_tokens` for its head, and as tails at least "
                    f"{tails} of `prompts`"
                )
            if self.cache == "off":
                raise ValueError(f'a {self.kind} workload is about the prompt cache; it needs `cache`: "on"')
            if self.protocol != "rounds":
                raise ValueError(f"the cases of a {self.kind} workload follow one another; it needs `rounds`")
        if (self.fill and self.kind != "prefix") or (self.restore and self.kind != "restart"):
            raise ValueError("`fill` belongs to a prefix workload, `restore` to a restart workload; leave it out")
        for name, kinds in (("up_to", {"ladder"}), ("streams", {"concurrency"}), ("risky", {"chat"})):
            if getattr(self, name) and self.kind not in kinds:
                raise ValueError(f"`{name}` belongs to a {' or '.join(kinds)} workload; leave it out")
        if self.salted and self.kind != "chat":
            raise ValueError("`salted` belongs to a chat workload: the heads of the others are salted always")
        if self.sampling.seeds and len(self.sampling.seeds) < self.repeats:
            raise ValueError(f"{self.repeats} rounds need as many `seeds`, found {len(self.sampling.seeds)}")
        ids = [p.id for p in self.prompts]
        named = [*ids, *([self.text.id] if self.text else [])]
        if len(set(named)) < len(named):
            raise ValueError("two prompts have one id; give each its own")
        if self.warmup.id in named or self.warmup.sha256 in {p.sha256 for p in self.prompts}:
            raise ValueError("the warm-up must not be a measured prompt: it would warm that prompt's cache")
        return self

    @property
    def cases(self) -> list[str]:
        if self.kind in CASES:
            left_out = {*(() if self.fill else AFTER_FILL), *(() if self.restore else ("restored",))}
            return [c for c in CASES[self.kind] if c not in left_out]
        if self.kind == "chat":
            return [p.id for p in self.prompts]
        return [str(n) for n in self.streams or self.lengths or _doubled(self.up_to)]

    @property
    def rises(self) -> bool:
        """Whether its cases rise in length until one fails, and may kill the engine."""
        return self.kind == "ladder" or self.risky


def _doubled(up_to: int) -> list[int]:
    """128, 256, 512 … and `up_to` last."""
    return [128 * 2**n for n in range(64) if 128 * 2**n < up_to] + [up_to]
