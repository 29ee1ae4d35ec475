"""What happens to attention scores before the softmax: scale, soft cap, mask, position bias. Found by probing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgespec.export.fuse.cut import Array
from edgespec.export.fuse.facts import Facts, Setting
from edgespec.export.fuse.region import Evaluator, Region
from edgespec.export.fuse.report import NoMatch

#: Masks add the lowest number, minus infinity, or (in old models) -10000; no position bias comes near that.
_MASKED = -9e3


@dataclass(frozen=True)
class Scores:
    """`softmax(softcap * tanh(scale * s / softcap) + slope * key position)` over the tokens seen.

    Attributes:
        softcap: 0 is none.
        window: tokens that a token sees, itself included; None is all before it.
        slopes: one a head (ALiBi, Press et al. 2022), or None.
    """

    scale: float
    softcap: float
    window: int | None
    slopes: tuple[float, ...] | None


def classify_scores(facts: Facts, start: ir.Value, end: ir.Value, num_heads: int, max_len: int) -> Scores:
    """Find out what turns the raw scores `start` into the softmax's input `end`.

    Looks at a few short texts, and at the end of one of `max_len` tokens, where any window shows.

    Raises:
        NoMatch: it is nothing that the fused operator can do.
    """
    if start is end:
        raise NoMatch("the scores are not masked")
    region = Region(facts, [start], end)
    evaluate = Evaluator(facts, region.leaves)
    far = Setting(2, max(max_len - 2, 1))
    probes = [_Probe(facts, region, evaluate, start, s, num_heads) for s in (*facts.settings, far)]
    window = probes[-1].window()
    for probe in probes:
        probe.require_window(window)
    scale, softcap = probes[0].response()
    for probe in probes:
        probe.require_response(scale, softcap)
    slopes = probes[-1].slopes()
    for probe in probes:
        probe.require_slopes(slopes)
    return Scores(scale, softcap, window, tuple(slopes.tolist()) if slopes.any() else None)


class _Probe:
    """The region at one setting; `base` (heads, new, total) is what it makes of scores of zero."""

    def __init__(
        self, facts: Facts, region: Region, evaluate: Evaluator, start: ir.Value, setting: Setting, num_heads: int
    ) -> None:
        self._region = region
        self._setting = setting
        self._leaves = evaluate(setting)
        self._input_shape = facts.shape_at(start, setting)
        self._shape = (num_heads, setting.new, setting.total)
        self.base = self._apply(np.zeros(self._shape, dtype=np.float32))
        self._visible = self.base > _MASKED

    def _apply(self, scores: Array) -> Array:
        result = self._region(scores.reshape(self._input_shape), leaves=self._leaves)
        if result.size != scores.size:
            raise NoMatch("the scores change their number before the softmax")
        return result.reshape(self._shape)

    def window(self) -> int | None:
        seen = int(self._visible[0, -1].sum())
        return None if seen == self._setting.total else seen

    def require_window(self, window: int | None) -> None:
        query = np.arange(self._setting.past, self._setting.total)[:, None]
        age = query - np.arange(self._setting.total)[None]
        expected = (age >= 0) & (age < (window or self._setting.total))
        if (self._visible != expected).any():
            raise NoMatch("the mask is neither causal nor a sliding window")

    def _response_to(self, scores: Array) -> Array:
        seen = self._visible
        changed: Array = self._apply(scores)[seen].astype(np.float64) - self.base[seen]
        return changed

    def response(self) -> tuple[float, float]:
        """Return scale and soft cap."""
        one = float(np.median(self._response_to(np.ones(self._shape, dtype=np.float32))))
        far = float(np.median(self._response_to(np.full(self._shape, 1e6, dtype=np.float32))))
        if one > 0 and abs(far / (one * 1e6) - 1) < 1e-3:
            return far / 1e6, 0.0
        if not 0 < one < far:
            raise NoMatch("the scores are neither scaled nor soft-capped before the softmax")
        return far * float(np.arctanh(one / far)), far

    def require_response(self, scale: float, softcap: float) -> None:
        scores = np.random.default_rng(2).uniform(-30, 30, self._shape).astype(np.float32)
        expected = scale * scores.astype(np.float64)[self._visible]
        if softcap:
            expected = softcap * np.tanh(expected / softcap)
        tolerance = 1e-4 * max(1.0, scale) + 1e-6 * float(np.abs(self.base[self._visible]).max())
        if np.abs(self._response_to(scores) - expected).max() > tolerance:
            raise NoMatch("the scores go through an unknown function before the softmax")

    def slopes(self) -> Array:
        """Return how fast the bias grows with the key's position, for each head."""
        ends = self._visible[0, -1].nonzero()[0]
        first, last = int(ends[0]), int(ends[-1])
        rise = (self.base[:, -1, last].astype(np.float64) - self.base[:, -1, first]) / max(last - first, 1)
        return np.where(np.abs(rise) * self._setting.total < 1e-6, 0, rise)

    def require_slopes(self, slopes: Array) -> None:
        position = np.arange(self._setting.total)
        rest = np.where(self._visible, self.base - slopes[:, None, None] * position, 0)
        first = self._visible.argmax(axis=-1)[..., None]
        rest = np.where(self._visible, rest - np.take_along_axis(rest, first, axis=-1), 0)
        if np.abs(rest).max() > 1e-5 * max(1.0, float(np.abs(slopes).max()) * self._setting.total):
            raise NoMatch("the position bias does not grow evenly with the key's position")
