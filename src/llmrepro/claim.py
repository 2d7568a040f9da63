"""Claims: a published value with its definition and conditions, or two measurements held against each other."""

from typing import Literal

from pydantic import Field, model_validator

from llmrepro import terms
from llmrepro.parts import MetricName, Name, Part, Scalar


class Conditions(Part):
    """What was stated about the published measurement; compared with what is found here."""

    deciding: dict[str, Scalar | None] = {}
    noted: dict[str, Scalar | None] = {}


class Value(Part):
    """A published value, in the one form in which it was published."""

    exact: str | int | None = Field(None, description="A fact: equal or not. A whole number, or a text.")
    point: float | None = None
    range: tuple[float, float] | None = None
    about: float | None = None
    peak: float | None = None
    at_least: float | None = None
    completed_to: int | None = Field(None, description="Tokens up to which every request completed.")
    failed_at: int | None = Field(None, description="Tokens at which a request failed.")

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
    relative: float = Field(gt=0, lt=1)
    reason: str


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
    n: int | None = None
    spread: tuple[float, float] | None = None
    conditions: Conditions = Conditions()
    evidence: terms.Evidence
    locator: str = Field(min_length=1, description="Where exactly it is stated.")
    tolerance: Tolerance | None = None

    @model_validator(mode="after")
    def _unit_of_metric(self):
        unit = terms.METRICS[self.metric].unit
        if self.unit != unit:
            raise ValueError(f"{self.metric} is in {unit or 'no unit'!r}, not {self.unit!r}")
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
    at_least: float | None = Field(None, gt=0)
    at_most: float | None = Field(None, gt=0)
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
