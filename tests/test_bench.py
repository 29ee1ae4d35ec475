"""Benchmarks: prompts, settings, what is recorded of a trial, and the figures that follow."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import median

import pytest

from edgespec import ConfigError, Engine, RuntimeParams, SamplingParams, SpecParams
from edgespec.bench import Bench, BenchPrompt, Plan, Trial, read_prompts, summarise
from edgespec.bench.journal import Journal, read_journal
from edgespec.bench.prompts import PACKAGED
from edgespec.bench.recorder import Recorder, Round, accepted_lengths, expected_rate
from edgespec.bench.settings import choose_settings
from edgespec.bench.trial import Place, first_difference, run_trial
from edgespec.bundle import read_bundle
from edgespec.policy import Choice, FixedPolicy, Outcome

SHORT = [BenchPrompt("1", "a", "abcabcabc"), BenchPrompt("1", "b", "Where are you?"), BenchPrompt("2", "a", "xyzxyz")]


def plan(**changes: object) -> Plan:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, seed=5)
    return dataclasses.replace(Plan(params=params, repetitions=2), **changes)


def quiet(text: str, fraction: float) -> None:
    assert 0 <= fraction <= 1


def write(folder: Path, **files: list[object]) -> Path:
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return folder


def trial(setting: str, seconds: float, prompt: str = "p", repetition: int = 0, **more: object) -> Trial:
    """11 tokens, so ten after the first, which took 1 s."""
    return Trial(setting, "f", prompt, repetition, 0, 5, 0, 11, 1 + seconds, 1.0, **more)  # type: ignore[arg-type]


def test_families_take_turns(tmp_path: Path) -> None:
    """The first prompt of each family, then the second ones; of a conversation the first message."""
    write(
        tmp_path,
        chat=[{"id": 7, "turns": ["one", "two"]}, {"prompt": "three"}, {"prompt": "four"}],
        code=[{"id": "x", "prompt": "five"}],
    )
    found = read_prompts(tmp_path, (), 2)
    assert found == [
        BenchPrompt("7", "chat", "one"),
        BenchPrompt("x", "code", "five"),
        BenchPrompt("2", "chat", "three"),
    ]
    assert [p.text for p in read_prompts(tmp_path, ["code"], 9)] == ["five"]


def test_prompts_that_cannot_be_used(tmp_path: Path) -> None:
    """Each mistake says which folder, family or line it is in."""
    with pytest.raises(ConfigError, match="is not a folder of prompts"):
        read_prompts(tmp_path / "nowhere", (), 1)
    with pytest.raises(ConfigError, match="has no prompts"):
        read_prompts(tmp_path, (), 1)
    write(tmp_path, a=[{"prompt": "x"}, {"text": "y"}], b=[{"prompt": " "}], c=["z"])
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: not a JSON object with `prompt`"):
        read_prompts(tmp_path, ["a"], 2)
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 1: the prompt is empty"):
        read_prompts(tmp_path, ["b"], 1)
    with pytest.raises(ConfigError, match=r"c\.jsonl, line 1"):
        read_prompts(tmp_path, ["c"], 1)
    with pytest.raises(ConfigError, match="no family 'd'; it has a, b, c"):
        read_prompts(tmp_path, ["d"], 1)


def test_the_packaged_prompts() -> None:
    """Several kinds, a few of each, no text twice."""
    found = read_prompts(None, (), 99)
    assert len({p.family for p in found}) == len(list(PACKAGED.glob("*.jsonl"))) >= 6
    assert len({p.text for p in found}) == len({(p.family, p.id) for p in found}) == len(found)
    assert min(sum(p.family == f for p in found) for f in {p.family for p in found}) >= 3


def test_settings() -> None:
    """Plain decoding and the default drafter always; without a model the chain is lookup."""
    spec = SpecParams()
    assert [s.name for s in choose_settings(["none"], spec, has_model=False)] == ["none", "ngram"]
    assert [s.name for s in choose_settings(["chain"], spec, has_model=False)] == ["none", "ngram"]
    both = choose_settings(["ngram", "model"], spec, has_model=True)
    assert [(s.name, s.in_pair) for s in both] == [
        ("none", False),
        ("none (as pair)", True),
        ("chain", True),
        ("ngram", False),
        ("model", True),
    ]
    fixed = [s for s in choose_settings(["none"], spec, has_model=True, search=True) if s.is_fixed]
    assert {s.name for s in fixed} >= {"ngram-1", "ngram-16", "model-1", "model-8"}
    assert all(s.name == f"{s.spec.drafter}-{s.spec.num_draft_tokens}" for s in fixed)
    with pytest.raises(ConfigError, match="no draft model"):
        choose_settings(["model"], spec, has_model=False)


class Promising(FixedPolicy):
    """Promises a rate that doubles with each choice."""

    tokens_per_s = 5.0

    def choose(self, offers: object, past: int, room: int) -> Choice:
        self.tokens_per_s *= 2
        return Choice("x", 3)


def test_what_a_recorder_keeps() -> None:
    """What was promised when the round was chosen; a round that nobody was asked about is not kept."""
    recorder = Recorder(Promising(3))
    recorder.learn(Outcome(None, (), 0, 1, 4, 1, 9.0, 0.0))
    for seconds, accepted in ((1.0, 3), (3.0, 0)):
        recorder.choose([], 4, 9)
        recorder.learn(Outcome("x", (0.0,) * 3, accepted, accepted + 1, 4, 4, seconds, 0.0))
    rounds = recorder.take()
    assert rounds == [Round(3, 3, 1.0, 10.0), Round(3, 0, 3.0, 20.0)]
    assert expected_rate(rounds) == (10 * 1 + 20 * 3) / 4
    assert accepted_lengths([*rounds, Round(0, 0, 1.0, None)]) == (1, 0, 0, 1)
    assert (recorder.take(), expected_rate([]), accepted_lengths([])) == ([], None, ())


def test_a_trial_reads_its_prompt_anew(tiny_bundle: Path) -> None:
    """Twice the same prompt costs the same reading, and gives the same text and counters."""
    with Engine(read_bundle(tiny_bundle), SpecParams(drafter="ngram"), RuntimeParams(), {}) as engine:
        engine.policy = Recorder(engine.policy)
        prompt, params = (
            engine.tokenizer.encode("abcabcabcabc", add_special_tokens=False),
            SamplingParams(max_new_tokens=20),
        )
        trials = [run_trial(engine, "ngram", prompt, params, Place("f", "p", n, 0))[0] for n in range(2)]
        expected = engine.generate(prompt, params)
        expected.text()
    assert [t.cached_tokens for t in trials] == [0, 0]
    assert trials[0].text_digest == trials[1].text_digest
    assert trials[0].new_tokens == expected.stats.new_tokens
    assert 0 < trials[0].first_token_s < trials[0].seconds
    assert sum(trials[0].accepted_lengths) <= trials[0].target_passes


def test_a_run(tiny_pair: Path) -> None:
    """Every setting answers every prompt once a repetition, at changing turns; all greedy texts are equal."""
    with Bench(read_bundle(tiny_pair), SHORT, plan(against=("ngram", "model"))) as bench:
        trials = list(bench.trials(quiet))
        assert bench.described["chain"]["spinning"] == "off"
        assert bench.described["ngram"]["spinning"] == "off"
        assert bench.costs is not None
    keys = [(t.setting, t.family, t.prompt_id, t.repetition) for t in trials]
    assert len(set(keys)) == len(keys) == 5 * 3 * 2
    assert {t.turn for t in trials if t.setting == "none"} == {0, 2, 3, 4}
    assert all(t.equal is True and t.cached_tokens == 0 and t.new_tokens == 24 for t in trials)
    assert all(t.predicted_tokens_per_s is not None for t in trials if t.setting == "chain")
    assert all(t.accepted == 0 and t.tokens_per_pass == 1 for t in trials if t.setting.startswith("none"))
    figures = summarise(trials, "chain")
    assert list(figures["speedup_by_family"]) == ["a", "b"]
    assert {row["setting"] for row in figures["rows"]} == {"none", "none (as pair)", "chain", "ngram", "model"}


def test_a_repetition_begins_with_nothing_learnt(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a policy of its own, which lives through all prompts."""
    policies: list[list[object]] = []
    original = Bench._fork

    def fork(self: Bench, *args: object) -> dict[str, Engine]:
        engines = original(self, *args)  # type: ignore[arg-type]
        policies.append([engine.policy for engine in engines.values()])
        return engines

    monkeypatch.setattr(Bench, "_fork", fork)
    with Bench(read_bundle(tiny_bundle), SHORT, plan()) as bench:
        list(bench.trials(quiet))
    assert len(policies) == 2
    assert not set(map(id, policies[0])) & set(map(id, policies[1]))


def test_a_search(tiny_pair: Path) -> None:
    """Fixed lengths draft as they are told, and the best of them is named for each family."""
    with Bench(read_bundle(tiny_pair), SHORT[:1], plan(search=True, repetitions=1)) as bench:
        trials = list(bench.trials(quiet))
    by_setting = {t.setting: t for t in trials}
    three = by_setting["model-3"]
    assert all(t.equal is True for t in trials)
    # The first pass and the last, for which there may be no room, draft less.
    assert 3 * (three.target_passes - 3) <= three.drafted <= 3 * three.target_passes
    assert len(by_setting["model-1"].accepted_lengths) <= 2
    found = summarise(trials, "chain")["search"]["a"]
    speeds = {s: by_setting["none"].seconds_per_token / t.seconds_per_token for s, t in by_setting.items()}
    fixed = {s: v for s, v in speeds.items() if s == "none" or s[-1].isdigit()}
    assert found["best_fixed"] == max(fixed, key=fixed.get)
    assert found["controller_over_best_fixed"] == pytest.approx(speeds["chain"] / max(fixed.values()))


def test_sampled_texts_are_not_compared(tiny_bundle: Path) -> None:
    """Unless the noise is shared; and each repetition has another seed."""
    params = SamplingParams(temperature=60, max_new_tokens=12, seed=1, ignore_eos=True)
    with Bench(read_bundle(tiny_bundle), SHORT[:1], plan(params=params)) as bench:
        trials = list(bench.trials(quiet))
    assert {t.equal for t in trials} == {"not comparable"}
    plain = [t.text_digest for t in trials if t.setting == "none"]
    assert plain[0] != plain[1]
    coupled = plan(params=params, spec=SpecParams(verifier="coupled"))
    with Bench(read_bundle(tiny_bundle), SHORT[:1], coupled) as bench:
        assert {t.equal for t in bench.trials(quiet)} == {True}


def test_prompts_that_are_too_long(tiny_bundle: Path) -> None:
    """They are left out and named; with no other prompt that is an error."""
    long = BenchPrompt("3", "a", "x" * 495)
    with Bench(read_bundle(tiny_bundle), [long, SHORT[0]], plan(repetitions=1)) as bench:
        assert {t.prompt_id for t in bench.trials(quiet)} == {"1"}
        assert bench.skipped == [long]
    with (
        pytest.raises(ConfigError, match="no prompt fits the context of 512"),
        Bench(read_bundle(tiny_bundle), [long], plan()),
    ):
        pass


def test_where_texts_part(tiny_bundle: Path) -> None:
    """The two best tokens of the plain path there are looked at."""
    with Bench(read_bundle(tiny_bundle), SHORT[:1], plan(repetitions=1)) as bench:
        trials = {t.setting: t for t in bench.trials(quiet)}
        plain = bench._parents[False]
        prompt = plain.tokenizer.encode("hello", add_special_tokens=False)
        stream = plain.generate(prompt, SamplingParams(max_new_tokens=6, logprobs=2))
        stream.text()
        expected, tops = stream.token_ids, [[token for token, _ in one.top] for one in stream.logprobs]
        other = [*expected[:4], tops[4][1], 9]
        at = first_difference(other, expected)
        answers = {
            "none": (trials["none"], expected),
            "ngram": (dataclasses.replace(trials["ngram"], first_difference=at), other),
        }
        bench._find_ties(plain, prompt, answers)
    (tie,) = bench.near_ties.values()
    assert (tie.setting, tie.index, tie.is_between_best) == ("ngram", 4, True)
    top = stream.logprobs[4].top
    assert tie.margin == pytest.approx(top[0][1] - top[1][1])


def test_first_difference() -> None:
    """The index of the first token that is not the same, or where one text ends."""
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_ratios_are_between_neighbours() -> None:
    """A prompt's figure is the median of its repetitions' ratios, the family's the median of its prompts."""
    trials = []
    for prompt, speeds in {"p": (2.0, 4.0, 8.0), "q": (1.0, 1.0, 1.0), "r": (3.0, 3.0, 5.0)}.items():
        for repetition, ratio in enumerate(speeds):
            slow = 10.0 * (repetition + 1)  # the machine gets slower; a ratio does not feel it
            trials.append(trial("none", slow, prompt, repetition, equal=True))
            trials.append(trial("none (as pair)", slow / 2, prompt, repetition, equal=True))
            trials.append(trial("chain", slow / ratio, prompt, repetition, equal=repetition > 0, drafted=4, accepted=1))
    figures = summarise(trials, "chain")
    assert figures["speedup_by_family"] == {"f": 3.0}
    assert figures["speedup_over_best_plain_by_family"] == {"f": 1.5}
    row = next(r for r in figures["rows"] if r["setting"] == "chain")
    assert row["speedup"] == pytest.approx({"median": 3.0, "low": 2.0, "high": 3.5})
    assert row["over_best_plain"]["median"] == pytest.approx(1.5)
    assert (row["prompts"], row["acceptance"], row["equal"], row["comparable"]) == (3, 0.25, 6, 9)
    assert row["tokens_per_s"] == pytest.approx(median(10 / t.seconds_per_token / 10 for t in trials[2::3]))
    assert row["first_token_ratio"] == 1


def test_prediction_and_peers() -> None:
    """Predicted over measured for those that predict; our speed over each way of another engine."""
    trials = [
        trial("none", 2.0),
        trial("ngram", 1.0, predicted_tokens_per_s=12.0),
        trial("onnxruntime-genai plain", 3.0),
        trial("onnxruntime-genai ngram 4", 1.5),
    ]
    figures = summarise(trials, "ngram")
    assert figures["prediction"]["ngram"]["median"] == pytest.approx(1.2)
    over = figures["over_peers"]
    assert list(over) == ["onnxruntime-genai plain", "onnxruntime-genai ngram 4"]
    assert [over[name]["f"] for name in over] == pytest.approx([3.0, 1.5])


def test_answers_of_one_token() -> None:
    """They have no rate, and a family of nothing else has no row."""
    one = dataclasses.replace(trial("none", 1.0), new_tokens=1)
    assert (one.seconds_per_token, one.tokens_per_s) == (None, None)
    figures = summarise([one, dataclasses.replace(one, setting="ngram")], "ngram")
    assert (figures["rows"], figures["speedup_by_family"], figures["geometric_mean"]) == ([], {}, None)


def test_a_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    """Trials, memory and facts; another kind of file is refused."""
    path = tmp_path / "new" / "run.jsonl"
    trials = [trial("none", 1.0), trial("ngram", 0.5, equal=True, accepted_lengths=(1, 2))]
    with Journal(path, {"machine": "m"}, {"none": {"threads": 2}}) as journal:
        for one in trials:
            journal.trial(one)
        journal.memory({"none": 5, "ngram": None})
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(line["machine"] == "m" for line in lines)
    assert (lines[0]["threads"], lines[0]["tokens_per_s"]) == (2, 10.0)
    run = read_journal(path)
    assert (run.trials, run.memory, run.costs) == (trials, {"none": 5, "ngram": None}, None)
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1: not written by"):
        read_journal(path)
