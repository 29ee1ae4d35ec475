"""The controller in a simulated world: known costs, known acceptance, no clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from edgespec.acceptance import AcceptanceModel
from edgespec.costs import CostCurve, CostTable
from edgespec.policy import PLAIN, AdaptivePolicy, Choice, FixedPolicy, Offer, Outcome

# Seconds of an int8 target on two cores by rows, and of a draft at a sixth of it.
TARGET = CostTable((16, 1024), (1, 2, 3, 5, 8, 16), ((6.3, 6.6, 7.7, 9.4, 12, 19), (8.9, 11.9, 13.4, 15.7, 20, 36)))
STEP = CostTable((16, 1024), (1, 16), ((1.0, 3.0), (1.3, 4.0)))


def scaled(table: CostTable, factor: float = 1e-3) -> CostTable:
    return CostTable(table.pasts, table.rows, tuple(tuple(s * factor for s in line) for line in table.seconds))


def curve(table: CostTable, max_rows: int = 17) -> CostCurve:
    return CostCurve(scaled(table), max_rows)


@dataclass
class World:
    """Simulates rounds: `alpha(position)` is the chance that a drafted token is accepted."""

    policy: AdaptivePolicy
    alpha: Callable[[int], float]
    lookup: bool = False
    seed: int = 0
    noise: float = 0.2
    position: int = 0
    seconds: float = 0.0
    depths: list[int] = field(default_factory=list)
    read_to: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.target, self.step = curve(TARGET), curve(STEP)

    def run(self, num_tokens: int, backlog: bool = False) -> float:
        """Seconds for so many tokens."""
        started, end = self.seconds, self.position + num_tokens
        while self.position < end:
            self.round(backlog)
        return self.seconds - started

    def round(self, backlog: bool) -> None:
        past = 100 + self.position
        behind = past - self.read_to if backlog else 0
        confidences = [0.9] * 16 if self.lookup else None
        choice = self.policy.choose([Offer("d", confidences, behind)], past, 100)
        drafted: list[float] = []
        while len(drafted) < choice.depth and (self.lookup or not drafted or self.policy.goes_on("d", drafted, past)):
            drafted.append(0.9)
        alpha = self.alpha(self.position)
        accepted = next((i for i in range(len(drafted)) if self.rng.random() >= alpha), len(drafted))
        draft_s = 0.0 if self.lookup else len(drafted) * self.step.seconds(past)[1]
        read = behind if drafted else 0
        draft_s += read * self.step.seconds(past)[-1] / 17
        self.read_to = past if drafted else self.read_to
        target_s = self.target.seconds(past)[len(drafted) + 1] * self.rng.uniform(1 - self.noise, 1 + self.noise)
        name = "d" if drafted else None
        self.policy.learn(
            Outcome(name, drafted, accepted, accepted + 1, past, len(drafted) + 1, target_s, draft_s, read)
        )
        if self.lookup and not drafted:
            self.policy.learn_shadow("d", [0.9], int(self.rng.random() < alpha))
        self.seconds += target_s + draft_s
        self.position += accepted + 1
        self.depths.append(len(drafted))


def adaptive(lookup: bool = False, prior: float = 0.5) -> AdaptivePolicy:
    return AdaptivePolicy(curve(TARGET), {"d": (None if lookup else curve(STEP), prior)})


def plain_seconds(num_tokens: int, start: int = 0) -> float:
    target = curve(TARGET)
    return float(sum(target.seconds(100 + start + i)[1] for i in range(num_tokens)))


def best_fixed_seconds(alpha: float, num_tokens: int, step: bool = True) -> float:
    """The same stretch by the best fixed depth in hindsight, by the closed form."""
    past = 100 + num_tokens // 2
    v, d = curve(TARGET).seconds(past), curve(STEP).seconds(past)[1] * step
    per_token = [(v[g + 1] + g * d) * (1 - alpha) / (1 - alpha ** (g + 1)) for g in range(17)]
    return num_tokens * min(per_token)


@pytest.mark.parametrize("alpha", [0.95, 0.8, 0.6, 0.4, 0.2])
@pytest.mark.parametrize("lookup", [False, True])
def test_close_to_the_best_fixed_depth(alpha: float, lookup: bool) -> None:
    """Over 2,000 tokens, learning included, within 5 % of the depth that hindsight would have chosen."""
    world = World(adaptive(lookup), lambda position: alpha, lookup)
    assert world.run(2000) <= 1.05 * best_fixed_seconds(alpha, 2000, not lookup)


@pytest.mark.parametrize("lookup", [False, True])
def test_a_hostile_drafter_costs_next_to_nothing(lookup: bool) -> None:
    """Always wrong: at most 3 % over plain decoding, from the first token on."""
    world = World(adaptive(lookup), lambda position: 0.0, lookup, noise=0.0)
    assert world.run(1000) <= 1.03 * plain_seconds(1000)


def test_parking_and_coming_back() -> None:
    """Good, then bad, then good: parked within 40 tokens, back within 200, and hardly slower than plain in between."""
    world = World(adaptive(), lambda position: 0.0 if 400 <= position < 1000 else 0.9, noise=0.0)
    world.run(400)
    assert np.mean(world.depths[-30:]) > 3
    world.run(40)
    world.depths.clear()
    bad = world.run(560)
    assert np.mean(world.depths) < 0.2
    assert bad <= 1.04 * plain_seconds(560, 440)
    world.run(200)
    world.depths.clear()
    world.run(400)
    assert np.mean(world.depths) > 3


def test_unread_text_is_read_only_when_it_pays() -> None:
    """A drafter that is a little faster waits; one that is much faster reads soon; and then stays."""
    eager = World(adaptive(prior=0.95), lambda position: 0.95)
    eager.run(30, backlog=True)
    assert max(eager.depths) > 0
    first = next(i for i, d in enumerate(eager.depths) if d)
    assert first > 0
    lazy = World(adaptive(prior=0.45), lambda position: 0.45)
    lazy.run(15, backlog=True)
    assert max(lazy.depths) == 0


def test_confidence_decides_how_deep() -> None:
    """Cells learn apart: sure proposals are checked long, unsure ones not at all."""
    policy = adaptive(lookup=True)
    for _ in range(60):
        policy.learn_shadow("d", [0.97], 1)
        policy.learn_shadow("d", [0.5], 0)
    assert policy.choose([Offer("d", [0.97] * 16)], 100, 100).depth >= 4
    assert policy.choose([Offer("d", [0.5] * 16)], 100, 100) == PLAIN


def test_the_drafter_with_the_higher_rate_is_taken() -> None:
    """Between a poor lookup and a good model, and the other way round."""
    policy = AdaptivePolicy(curve(TARGET), {"lookup": (None, 0.5), "model": (curve(STEP), 0.8)})
    for _ in range(50):
        policy.learn_shadow("lookup", [0.9], 0)
    offers = [Offer("lookup", [0.9] * 8), Offer("model", None)]
    assert policy.choose(offers, 100, 100).name == "model"
    for _ in range(200):
        policy.learn_shadow("lookup", [0.9] * 4, 4)
    choice = policy.choose(offers, 100, 100)
    assert choice.name == "lookup"
    assert choice.depth == 8


def test_the_rest_of_a_round_counts() -> None:
    """What a round takes beside the models is part of what it costs: the rate that is expected is that of whole rounds,
    and a draft that does not quite pay against the models' time alone does where rounds take longer. A round that was
    interrupted counts little."""
    found = {}
    for other_s in (0.0, 5e-3):
        policy = adaptive(prior=0.2)
        for _ in range(100):
            policy.learn(Outcome(None, (), 0, 1, 100, 1, curve(TARGET).seconds(100)[1], 0.0, 0, other_s))
        if other_s:
            policy.learn(Outcome(None, (), 0, 1, 100, 1, curve(TARGET).seconds(100)[1], 0.0, 0, 100.0))
        policy.choose([Offer("d", None)], 100, 1)
        found[other_s] = policy.tokens_per_s
    seconds, step_s = curve(TARGET).seconds(100), curve(STEP).seconds(100)[1]
    assert 1.2 / (seconds[2] + step_s) < 1 / seconds[1]
    assert 1.2 / (seconds[2] + step_s + 5e-3) > 1 / (seconds[1] + 5e-3)
    assert found[0.0] == pytest.approx(1 / seconds[1], rel=0.01)  # plain decoding's
    assert 1.2 / (seconds[2] + step_s + 8e-3) < found[5e-3] < 1.2 / (seconds[2] + step_s + 5e-3) * 1.01  # the draft's


def test_room_and_emptiness_bound_the_choice() -> None:
    """Never deeper than there is room, and plain where nothing is offered."""
    policy = adaptive(prior=0.99)
    assert policy.choose([Offer("d", None)], 100, 2).depth <= 2
    assert policy.choose([Offer("d", None)], 100, 0) == PLAIN
    assert policy.choose([Offer("d", [])], 100, 100) == PLAIN
    assert policy.choose([], 100, 100) == PLAIN


def test_a_fixed_policy_is_fixed() -> None:
    """The first drafter that offers something, always to the same depth."""
    policy = FixedPolicy(4)
    assert policy.choose([Offer("a", []), Offer("b", None)], 10, 100) == Choice("b", 4)
    assert policy.choose([Offer("a", [1.0, 1.0]), Offer("b", None)], 10, 100) == Choice("a", 2)
    assert policy.choose([Offer("b", None)], 10, 3) == Choice("b", 3)
    assert policy.goes_on("b", [0.0] * 3, 10)
    assert FixedPolicy(0).choose([Offer("b", None)], 10, 100) == PLAIN


def test_the_chances_of_a_draft_are_those_of_its_tokens() -> None:
    """Taken together or one by one; after 200 drafts that were accepted as their confidences say."""
    model, rng = AcceptanceModel(0.5), np.random.default_rng(0)
    for _ in range(200):
        confidences = rng.random(rng.integers(1, 16)).tolist()
        refused = [i for i, c in enumerate(confidences) if rng.random() > c]
        model.observe(confidences, refused[0] if refused else len(confidences))
    confidences = [0.1, 0.9, 0.1, 0.999, 0.999, 0.999, 0.1, 0.1]
    assert model.at_each(confidences) == [model.at(i, c) for i, c in enumerate(confidences)]
    assert model.at(0, 0.1) < 0.3 < 0.7 < model.at(1, 0.9)
    assert model.at_each([]) == []


def test_costs_follow_what_is_seen() -> None:
    """Twice the load doubles every cost; a wider call that is dearer than measured changes that width alone."""
    costs = curve(TARGET)
    before = costs.seconds(100)
    for _ in range(60):
        costs.observe(1, 100, 2 * before[1])
    assert costs.seconds(100)[[1, 5, 17]] == pytest.approx(2 * before[[1, 5, 17]], rel=0.25)
    costs = curve(TARGET)
    for _ in range(400):
        costs.observe(1, 100, before[1])
        costs.observe(5, 100, 1.5 * before[5])
    after = costs.seconds(100)
    assert after[5] / after[1] == pytest.approx(1.5 * before[5] / before[1], rel=0.05)
    assert before[3] / before[1] <= after[3] / after[1] <= 1.5 * before[3] / before[1]


def test_costs_between_and_beyond_the_measured_points() -> None:
    """Straight lines; 0 for no rows; one interrupted call changes nothing."""
    costs = CostCurve(CostTable((0, 100), (1, 3), ((1.0, 2.0), (2.0, 6.0))), 6)
    assert costs.seconds(0).tolist() == [0, 1, 1.5, 2, 2.5, 3, 3.5]
    assert costs.seconds(50)[[1, 3]].tolist() == [1.5, 4]
    assert costs.seconds(200)[[1, 3]].tolist() == [3, 10]
    costs.observe(3, 0, 100.0)
    costs.observe(50, 0, 1.0)
    assert costs.seconds(0)[3] == 2


def test_noise_in_the_measurement_is_smoothed() -> None:
    """A point that is dearer than a wider one is pooled with it."""
    costs = CostCurve(CostTable((0,), (1, 2, 3, 5), ((1.0, 4.0, 2.0, 5.0),)), 5)
    assert costs.seconds(0).tolist() == [0, 1, 3, 3, 4, 5]


def test_a_step_in_the_costs_is_looked_across() -> None:
    """The second token does not pay alone, and all that follow it do: drafting goes on."""
    table = CostTable((0,), (1, 2, 3, 4, 5, 6), ((1.0, 1.1, 2.0, 2.0, 2.0, 2.0),))
    policy = AdaptivePolicy(CostCurve(table, 6), {"d": (CostCurve(CostTable((0,), (1,), ((0.05,),)), 6), 0.97)})
    assert policy.choose([Offer("d", None)], 10, 100).depth == 5
    assert policy.goes_on("d", [0.5], 10)
    assert not policy.goes_on("d", [0.5] * 5, 10)
