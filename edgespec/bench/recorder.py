"""`Recorder`: looks on while a policy decides, and keeps what it expected beside what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.contracts import DraftPolicy
from edgespec.policy import Choice, Offer, Outcome


@dataclass(frozen=True, slots=True)
class Round:
    """A round that the policy was asked about.

    Attributes:
        drafted, accepted: tokens.
        seconds: of the whole round.
        expected_tokens_per_s: of the choice, or `None` where the policy does not say.
    """

    drafted: int
    accepted: int
    seconds: float
    expected_tokens_per_s: float | None


class Recorder:
    """A policy that passes everything on to another.

    Args:
        policy: the one that decides.

    Attributes:
        rounds: since the last `take`.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        self._policy = policy
        self._is_asked = False
        self.rounds: list[Round] = []

    @property
    def max_depth(self) -> int:
        return self._policy.max_depth

    def choose(self, offers: Sequence[Offer], past: int, room: int) -> Choice:
        self._is_asked = True
        return self._policy.choose(offers, past, room)

    def goes_on(self, name: str, confidences: Sequence[float], past: int) -> bool:
        return self._policy.goes_on(name, confidences, past)

    def learn(self, outcome: Outcome) -> None:
        # Before the policy learns: until then this is what it expected of the round.
        expected = getattr(self._policy, "tokens_per_s", None)
        self._policy.learn(outcome)
        if self._is_asked:
            self.rounds.append(Round(len(outcome.confidences), outcome.num_accepted, outcome.seconds, expected))
        self._is_asked = False

    def learn_shadow(self, name: str, confidences: Sequence[float], num_accepted: int) -> None:
        self._policy.learn_shadow(name, confidences, num_accepted)

    def take(self) -> list[Round]:
        """The rounds since the last call."""
        rounds, self.rounds, self._is_asked = self.rounds, [], False
        return rounds


def expected_rate(rounds: Sequence[Round]) -> float | None:
    """Tokens per second that the choices promised: each for as long as its round took. `None` if none did."""
    promised = [(r.expected_tokens_per_s, r.seconds) for r in rounds if r.expected_tokens_per_s is not None]
    seconds = sum(s for _, s in promised)
    return sum(rate * s for rate, s in promised) / seconds if seconds else None


def accepted_lengths(rounds: Sequence[Round]) -> tuple[int, ...]:
    """How many rounds with a draft had 0, 1, 2, ... of its tokens accepted."""
    lengths = [r.accepted for r in rounds if r.drafted]
    return tuple(lengths.count(n) for n in range(max(lengths, default=-1) + 1))
