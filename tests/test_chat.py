"""Chat templates: the text that transformers renders, and nothing that a hostile template could do."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pytest

from edgespec.chat import ChatTemplate, drop_oldest
from edgespec.errors import BundleError, ConfigError, ContextOverflowError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {% else %}
        {{ raise_exception('Only user and assistant roles are supported!') }}
    {% endif %}
{% endfor %}"""
LOOPS = """{{ tools is none }}{{ documents is defined }}{% set ns = namespace(count=0) %}
{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}
{% set ns.count = ns.count + 1 %}{{ ns.count ~ ': ' ~ (m | tojson) ~ m.content.split('x')[-1] }}
{{ {'a': 'é<&', 'b': [1]} | tojson(indent=2) | indent(4) }}{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}"""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "What is <b>\"ü\"</b> & 'x'?\n"}
CHAT = [USER, {"role": "assistant", "content": " An answer. "}, {"role": "user", "content": "And {{ 1 }}?"}]


def ask(source: str, messages: list[dict[str, str]] | None = None) -> str:
    return ChatTemplate(source, SPECIAL).render(messages or [USER])


FAMILIES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "loops": LOOPS}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.export
def test_renders_what_transformers_renders(family: str, add_generation_prompt: bool) -> None:
    """The prompt of the usual families is, to the letter, the one that transformers makes."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle; install edgespec[export]")
    from tokenizers import Tokenizer, models

    oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    template = ChatTemplate(FAMILIES[family], SPECIAL)
    for start in ([], [{"role": "system", "content": " Be brief. "}])[: 1 if family == "mistral" else 2]:
        expected = oracle.apply_chat_template(start + CHAT, chat_template=FAMILIES[family], **options)
        assert template.render(start + CHAT, add_generation_prompt=add_generation_prompt) == expected


def test_chatml_to_the_letter() -> None:
    """ChatML with its default system prompt, written out by hand."""
    assert ask(CHATML, [{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_refusal_of_the_template_is_the_callers_mistake() -> None:
    """`raise_exception` becomes a ConfigError with the template's words."""
    with pytest.raises(ConfigError, match="refuses these messages: Conversation roles must alternate"):
        ask(MISTRAL, [{"role": "system", "content": "x"}])


BROKEN = {
    "syntax": ("{% for m in messages %}", "syntax error in line 1"),
    "unknown filter": ("{{ 1 | no_such_filter }}", "no_such_filter"),
    "undefined": ("{{ messages[0].tool_calls[0].name }}", "no attribute 'tool_calls'"),
    "wrong type": ("{{ 'a' + 1 }}", "TypeError"),
    "division": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "import": ("{% include 'other' %}", "loader|TypeError"),
    "unparsable python": ("{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "cannot be compiled|fails"),
    "class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|__class__"),
    "globals": ("{{ raise_exception.__globals__['json'] }}", "unsafe|__globals__"),
    "format": ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe|__class__"),
    "mutation": ("{{ messages.append(1) }}", "append"),
    "power": ("{{ 9 ** 9 ** 9 ** 9 }}", r"\*\*"),
    "product": ("{{ ('x' * 99999999999) | length }}", "characters"),
    "product of a list": ("{% for i in [0] * 99999999999 %}{% endfor %}", "characters"),
    "percent": ("{{ '%099999999999d' % 1 }}", "%"),
    "padding": ("{{ 'x'.ljust(99999999999) }}", "characters"),
    "indent": ("{{ 'x' | indent(99999999999) }}", "100 columns"),
    "centre": ("{{ 'x' | center(99999999999) }}", "center"),
    "range": ("{% for i in range(999999999) %}{% endfor %}", "characters"),
    "output": ("{% for i in range(99999) %}{% for j in range(99999) %}xxxx{% endfor %}{% endfor %}", "characters"),
    "doubling": ("{% set x = 'xxxxxxxx' %}" + "{% set x = x ~ x %}" * 60, "characters"),
    "adding": ("{% set x = 'xxxxxxxx' %}" + "{% set x = x + x %}" * 60, "characters"),
    "doubling macro": (
        "{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f(messages[0].content) }}",
        "characters|Recursion",
    ),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_or_hostile_template_is_one_line(source: str, reason: str) -> None:
    """Whatever a template does wrong, quickly and without harm, it becomes one line that says what."""
    start = time.perf_counter()
    with pytest.raises(BundleError, match=reason) as caught:
        ask(source)
    assert len(str(caught.value).splitlines()) == 1
    assert time.perf_counter() - start < 4


def test_template_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that writes nothing is stopped by the clock."""
    monkeypatch.setattr("edgespec.chat.MAX_SECONDS", 0.2)
    start = time.perf_counter()
    with pytest.raises(BundleError, match="seconds"):
        ask("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    assert time.perf_counter() - start < 4


def test_long_messages_are_within_the_bounds() -> None:
    """The bound on the output grows with the messages."""
    text = "word " * 500_000
    assert text in ask(CHATML, [{"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty"),
        ("hello", "not a list"),
        ({"role": "user", "content": "x"}, "not a list"),
        (["hello"], r"messages\[0\] is a str"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] is None"),
        ([USER, {"content": "x"}], r"messages\[1\]\['role'\] is None"),
        ([{"role": "user", "content": ["x"]}], "must be a string"),
        ([{"role": "", "content": "x"}], "is empty"),
    ],
)
def test_malformed_messages_are_named(messages: object, reason: str) -> None:
    """A malformed message is refused with its index and key, before the template sees it."""
    with pytest.raises(ConfigError, match=reason):
        ChatTemplate(CHATML, SPECIAL).render(messages)  # type: ignore[arg-type]


def turns(count: int) -> list[dict[str, str]]:
    """A system prompt, `count` turns of 20 characters and a question of 10."""
    messages = [{"role": "system", "content": "s" * 10}]
    for i in range(count):
        messages += [{"role": "user", "content": f"u{i:<9}"}, {"role": "assistant", "content": f"a{i:<9}"}]
    return [*messages, {"role": "user", "content": "q" * 10}]


def length(messages: Sequence[Mapping[str, str]]) -> int:
    return sum(len(m["content"]) for m in messages)


@pytest.mark.parametrize("limit", [20, 40, 100, 101, 140, 220])
def test_dropping_leaves_what_fits(limit: int) -> None:
    """Whole turns from the oldest on; system prompt and question stay; not more than a quarter too many."""
    messages = turns(10)
    kept, dropped = drop_oldest(messages, length, limit)
    assert length(kept) <= limit
    assert kept == [messages[0], *messages[1 + len(dropped) :]]
    assert list(dropped) == messages[1 : 1 + len(dropped)]
    assert kept[1]["role"] == "user"
    assert kept[-1]["content"] == "q" * 10
    assert length(kept) > min(length(messages), limit - limit // 4 - 20) - 1 or len(kept) == 2


def test_the_cut_stays_while_the_conversation_grows() -> None:
    """What is kept begins at the same message for several turns on end."""
    firsts = [drop_oldest(turns(n), length, 160)[0][1]["content"] for n in range(8, 40)]
    assert len(set(firsts)) <= 1 + 32 * 20 // 40 + 1
    assert max(firsts.count(first) for first in firsts) >= 2
    assert firsts == sorted(firsts, key=lambda content: int(content[1:]))


def test_what_cannot_be_dropped_must_fit() -> None:
    """A question or a system prompt that is too long is an overflow, and so is a chat without turns."""
    for messages in (turns(3), turns(0), turns(0)[1:], turns(0)[:1]):
        with pytest.raises(ContextOverflowError, match="shorten"):
            drop_oldest(messages, length, 9)
    assert drop_oldest(turns(3), length, 80) == (turns(3), ())
