"""What a checkpoint is like inside, as far as memory and bandwidth go: layers, size, what a token reads."""

from typing import Literal

from pydantic import Field, model_validator

from llmrepro.parts import Part

MOST_LAYERS, MOST_WIDE = 10_000, 1_000_000  # far above any model: what is beyond is a slip
Locator = Field(min_length=1, description="Where exactly it is stated.")


class Attention(Part):
    """Layers that keep keys and values: `full_layers` of every token, `windowed_layers` of a part of them.

    Drafters and layers for multi-token prediction are not counted.
    """

    full_layers: int = Field(ge=0, le=MOST_LAYERS)
    windowed_layers: int = Field(0, ge=0, le=MOST_LAYERS)
    window_tokens: int | None = Field(
        None, gt=0, le=10**9, description="A chunk's length, or the sliding window's."
    )
    window: Literal["chunked", "sliding"] | None = None
    kv_heads: int = Field(gt=0, le=MOST_WIDE)
    head_dim: int = Field(gt=0, le=MOST_WIDE, description="Of a key.")
    value_head_dim: int | None = Field(None, gt=0, le=MOST_WIDE, description="None: as long as a key.")
    locator: str = Locator

    @model_validator(mode="after")
    def _windows_are_whole(self):
        told = {self.window_tokens is not None, self.window is not None}
        if told != {self.windowed_layers > 0}:
            raise ValueError("`window_tokens` and `window` belong to `windowed_layers`, which need both")
        if not self.layers:
            raise ValueError("needs at least one layer: `full_layers`, `windowed_layers` or both")
        return self

    @property
    def layers(self) -> int:
        return self.full_layers + self.windowed_layers


class LinearAttention(Part):
    """Layers of gated delta net: a state per sequence that does not grow with it."""

    layers: int = Field(gt=0, le=MOST_LAYERS)
    key_heads: int = Field(gt=0, le=MOST_WIDE)
    value_heads: int = Field(gt=0, le=MOST_WIDE)
    key_head_dim: int = Field(gt=0, le=MOST_WIDE)
    value_head_dim: int = Field(gt=0, le=MOST_WIDE)
    conv_kernel: int = Field(gt=1, le=1000)
    state_dtype: str | None = Field(None, description="As the config states it; a server's argument goes before.")
    locator: str = Locator


class Parameters(Part):
    """Billions of parameters; `active_b` of a mixture of experts are those that one token uses."""

    total_b: float = Field(ge=1e-6, le=1e6)
    active_b: float | None = Field(None, ge=1e-6, le=1e6, description="None: all of them.")
    bits_per_weight: float | None = Field(
        None, ge=0.1, le=64, description="As stored, with scales: 6.5625 of Q6_K."
    )
    locator: str = Locator

    @model_validator(mode="after")
    def _active_are_a_part(self):
        if self.active_b is not None and self.active_b > self.total_b:
            raise ValueError(f"`active_b` {self.active_b} are more than all, `total_b` {self.total_b}")
        return self

    @property
    def active_share(self) -> float:
        return 1.0 if self.active_b is None else self.active_b / self.total_b


class Read(Part):
    """Bytes of weights that are read to decode one token, or to verify one draft."""

    bytes_per_token: int = Field(gt=0, le=10**15)
    locator: str = Locator


class Shape(Part):
    attention: Attention
    linear: LinearAttention | None = None
    parameters: Parameters | None = None
    read: Read | None = None

    @property
    def hybrid(self) -> bool:
        """Whether a sequence keeps something else than every token in every layer."""
        return self.attention.windowed_layers > 0 or self.linear is not None


class Memory(Part):
    """The memory that the published machine decoded from. `bandwidth_gb_s` counts 10^9 bytes."""

    bandwidth_gb_s: float = Field(ge=1e-3, le=1e6)
    kind: Literal["nominal", "measured"]
    llc_mib: float | None = Field(None, ge=1e-3, le=1e6, description="Last-level cache.")
    locator: str = Locator
