"""Finding rotary position embedding by what it does to numbers, and writing its tables.

RoPE (Su et al. 2021) turns pairs of a head's channels by an angle that grows with the position. Whatever lies
between a head's values before and after it (slices, negations, scaled frequencies) is fed test vectors here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgespec.export.fuse.cut import Array
from edgespec.export.fuse.facts import Facts, Setting
from edgespec.export.fuse.region import Evaluator, Region
from edgespec.export.fuse.report import NoMatch
from edgespec.export.fuse.trace import dominator

_TOLERANCE = 2e-6
_CHUNK = 256


@dataclass(frozen=True)
class Tables:
    """Cosines and sines, shape (rows, width / 2): of the first `width` channels; row = position."""

    cos: Array
    sin: Array
    interleaved: bool

    @property
    def width(self) -> int:
        return 2 * int(self.cos.shape[1])


@dataclass(frozen=True)
class Rotation:
    """A part of the graph that rotates `source`, shape [1, heads, tokens, head_dim], by position.

    Attributes:
        width: channels that are rotated, from the first on.
        interleaved: whether the pairs are neighbours; otherwise channel i is paired with i + width / 2.
    """

    source: ir.Value
    region: Region
    width: int
    interleaved: bool


def find_rotation(facts: Facts, value: ir.Value, shapes: Sequence[tuple[int, ...]]) -> Rotation | None:
    """Return the rotation that makes `value`, whose shapes at the settings are `shapes`, if there is one."""
    source = dominator(facts, value)
    if source is None or not facts.has_shape(source, shapes):
        return None
    try:
        region = Region(facts, [source], value)
        width = max(_width(region, shape, i) for i, shape in enumerate(shapes))
        for interleaved in (False, True):
            if width and width % 2 == 0 and _rotates(region, shapes, width, interleaved):
                return Rotation(source, region, width, interleaved)
    except NoMatch:  # a region that cannot be run is not a rotation; it stays in the graph as it is
        return None
    return None


def make_tables(facts: Facts, rotation: Rotation, shape: tuple[int, ...], rows: int) -> Tables:
    """Return the angles of positions 0 to `rows` - 1.

    Raises:
        NoMatch: the angle of a position depends on more than the position.
    """
    evaluator = Evaluator(facts, rotation.region.leaves)
    parts = []
    for start in range(0, rows, _CHUNK):
        setting = Setting(min(_CHUNK, rows - start), start)
        parts.append(_angles(rotation, (*shape[:-2], setting.new, shape[-1]), evaluator(setting)))
    cos, sin = (np.concatenate(part) for part in zip(*parts, strict=True))
    tables = Tables(cos, sin, rotation.interleaved)
    if not explains(facts, rotation, shape, tables):
        raise NoMatch("the rotary angle of a token depends on more than its position")
    return tables


def explains(facts: Facts, rotation: Rotation, shape: tuple[int, ...], tables: Tables) -> bool:
    """Whether `tables` say what `rotation` does at the settings of the facts, and at the last rows."""
    if (rotation.width, rotation.interleaved) != (tables.width, tables.interleaved):
        return False
    evaluator = Evaluator(facts, rotation.region.leaves)
    rows = len(tables.cos)
    last = Setting(min(4, rows), rows - min(4, rows))
    for setting in (*(s for s in facts.settings if s.total <= rows), last):
        cos, sin = _angles(rotation, (*shape[:-2], setting.new, shape[-1]), evaluator(setting))
        here = slice(setting.past, setting.total)
        if not (_close(cos, tables.cos[here]) and _close(sin, tables.sin[here])):
            return False
    return True


def _close(a: Array, b: Array) -> bool:
    return bool(np.abs(a - b).max() <= _TOLERANCE * max(1.0, float(np.abs(b).max())))


def _angles(rotation: Rotation, shape: tuple[int, ...], leaves: Sequence[Array]) -> tuple[Array, Array]:
    """Return cosines and sines, shape (tokens, width / 2), by rotating vectors whose pairs are (1, 0)."""
    first, second = _pairs(rotation.width, rotation.interleaved)
    probe = np.zeros(shape, dtype=np.float32)
    probe[..., first] = 1
    rotated = rotation.region(probe, leaves=leaves).reshape(-1, *shape[-2:])[0]
    return rotated[:, first], rotated[:, second]


def _pairs(width: int, interleaved: bool) -> tuple[Array, Array]:
    channels = np.arange(width)
    if interleaved:
        return channels[0::2], channels[1::2]
    return channels[: width // 2], channels[width // 2 :]


def _random(shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _width(region: Region, shape: tuple[int, ...], setting: int) -> int:
    data = _random(shape)
    changed = (region(data, setting=setting).reshape(shape) != data).reshape(-1, shape[-1]).any(axis=0)
    return int(changed.nonzero()[0][-1]) + 1 if changed.any() else 0


def _rotates(region: Region, shapes: Sequence[tuple[int, ...]], width: int, interleaved: bool) -> bool:
    first, second = _pairs(width, interleaved)
    for i, shape in enumerate(shapes):
        probe = np.zeros(shape, dtype=np.float32)
        probe[..., first] = 1
        turned = region(probe, setting=i).reshape(shape)
        cos, sin = turned[..., :1, :, first], turned[..., :1, :, second]
        data = _random(shape)
        expected = data.copy()
        expected[..., first] = data[..., first] * cos - data[..., second] * sin
        expected[..., second] = data[..., second] * cos + data[..., first] * sin
        if not np.allclose(region(data, setting=i).reshape(shape), expected, rtol=1e-5, atol=1e-5):
            return False
    return True
