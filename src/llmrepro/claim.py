"""Claims: a published value with its definition and conditions, or two measurements held against each other."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from llmrepro import terms
from llmrepro.parts import ConditionName, Figure, MetricName, Name, Part, Positive, Scalar, sized

RATES = ("s", "tok/s")  # units in which nothing is measured as nought


class Conditions(Part):
    """What was stated about the published measurement; compared with what is found here. None: not stated."""

    deciding: dict[ConditionName, Scalar | None] = {}
    noted: dict[ConditionName, Scalar | None] = {}


class Value(Part):
    """A published value, in the one form in which it was published."""

    exact: Annotated[str | int, AfterValidator(sized)] | None = Field(
        None, description="A fact: equal or not. A whole number, or a text."
    )
    point: Figure | None = None
    range: tuple[Figure, Figure] | None = None
    about: Figure | None = None
    peak: Figure | None = None
    at_least: Figure | None = None
    at_most: Figure | None = None
    completed_to: int | None = Field(
        None, ge=1, le=10**9, description="Prompt tokens up to which every request completed."
    )
    failed_at: int | None = Field(None, ge=1, le=10**9, description="Prompt tokens at which a request failed.")
    words: str | None = Field(
        None, pattern=r"\S", description="What was said without a number; it is shown and not judged."
    )

    @model_validator(mode="after")
    def _one_form(self):
        if len(self.model_fields_set) != 1 or self.published is None:
            raise ValueError(f"needs exactly one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def form(self) -> str:
        return next(iter(self.model_fields_set))

    @property
    def published(self):
        return getattr(self, self.form)


class Tolerance(Part):
    relative: float = Field(ge=1e-6, lt=1)
    reason: str = Field(min_length=1)


class Between(Part):
    """How far apart equal measurements lie on another start or another card: `relative` standard deviation.

    `metric` is the beginning of a metric's id, `sampled` whether only sampled (or only greedy) answers are meant.
    """

    metric: Name
    sampled: bool | None = None
    relative: float = Field(ge=1e-6, lt=1)
    of: Literal["boot", "card"]
    source: str = Field(min_length=1, description="Where it was measured.")


class Claim(Part):
    id: Name
    title: str = ""
    server: Name | None = None
    workload: Name | None = None
    case: str | None = None
    metric: MetricName
    definition: str | None = None
    statistic: Literal["value", "mean_of_means", "token_weighted", "median", "log_window"] = "value"
    value: Value
    unit: str = ""
    n: int | None = Field(None, ge=1, le=10**9)
    spread: tuple[Figure, Figure] | None = Field(None, description="Least and greatest of the n.")
    samples: list[Positive] = Field([], description="The published samples that the value is the mean of.")
    stated: str | None = Field(None, description="How the publication writes it, where that differs.")
    conditions: Conditions = Conditions()
    evidence: terms.Evidence
    locator: str = Field(min_length=1, description="Where exactly it is stated.")
    tolerance: Tolerance | None = None
    between: Between | None = Field(None, description="None: the recipe's.")

    @model_validator(mode="after")
    def _fits_form(self):
        ends = self.value.published if self.value.form == "range" else ()
        if list(ends) != sorted(ends):
            raise ValueError(f"a range goes from low to high; found {ends}")
        if list(self.spread or ()) != sorted(self.spread or ()):
            raise ValueError(f"a spread goes from low to high; found {self.spread}")
        if (self.value.form in ("completed_to", "failed_at")) != (self.metric == "outcome"):
            raise ValueError("`completed_to` and `failed_at` are claimed of the metric outcome, and only of it")
        return self

    @model_validator(mode="after")
    def _unit_of_metric(self):
        unit = terms.METRICS[self.metric].unit
        if self.unit != unit:
            raise ValueError(f"{self.metric} is in {unit or 'no unit'!r}, not {self.unit!r}")
        stated = self.value.published if isinstance(self.value.published, tuple) else (self.value.published,)
        if unit in RATES and any(isinstance(n, int | float) and n <= 0 for n in stated):
            raise ValueError(f"{self.metric}, in {unit}, is above nought; found {self.value.published}")
        if isinstance(self.value.exact, int) and self.value.exact < 0:
            raise ValueError(f"{self.metric} is never below nought; found {self.value.exact}")
        if self.value.form == "exact":
            if terms.METRICS[self.metric].better is not None:
                raise ValueError(f"{self.metric} is measured and never exact; give `point`, `about` or `range`")
            wanted = str if self.metric.endswith("sha256") else int
            if not isinstance(self.value.exact, wanted):
                raise ValueError(
                    f"{self.metric} is a {'text' if wanted is str else 'whole number'}, "
                    f"found {self.value.exact!r}; mind the quotes"
                )
        return self


class Side(Part):
    """One side of a comparison: the rows of a result that it means. `arm` names a study's arm."""

    arm: Name | None = None
    server: Name | None = None
    workload: Name | None = None
    case: str | None = None


class Comparison(Part):
    """A claim across two measurements made here: `a` against `b`, of one metric.

    Exactly one of `order` (a above or below b), `ratio` (a / b as published) and the thresholds of an effect,
    `at_least` and `at_most` (of a / b).
    """

    id: Name
    title: str = ""
    metric: MetricName
    statistic: Literal["value", "mean_of_means", "token_weighted"] = "value"
    a: Side
    b: Side
    each_case: bool = Field(False, description="Claimed of every case of the workload, not of their mean.")
    order: Literal["above", "below"] | None = None
    ratio: Value | None = None
    at_least: Positive | None = None
    at_most: Positive | None = None
    conditions: Conditions = Conditions()
    evidence: terms.Evidence
    locator: str = Field(min_length=1, description="Where exactly it is stated.")
    tolerance: Tolerance | None = None

    @model_validator(mode="after")
    def _one_form(self):
        forms = [n for n in ("order", "ratio", "at_least", "at_most") if getattr(self, n) is not None]
        if len(forms) != 1:
            raise ValueError(f"needs exactly one of order, ratio, at_least, at_most; found {forms or 'none'}")
        if self.ratio is not None and self.ratio.form not in ("point", "range", "about"):
            raise ValueError(f"a ratio is a `point`, a `range` or `about`, not {self.ratio.form!r}")
        if self.ratio is not None:
            ends = self.ratio.published if self.ratio.form == "range" else (self.ratio.published,)
            if min(ends) <= 0 or list(ends) != sorted(ends):
                raise ValueError(f"a ratio is above nought, a range from low to high; found {ends}")
        if self.a == self.b:
            raise ValueError("`a` and `b` are the same; a comparison needs two")
        return self
