"""What people ask of a text or of code that they give with the question: answers to it look back, and copy.

Left to itself a small target seldom asks for that. Knows words and no model.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence

from edgespec.distill.corpus import docstrings, parse

# Each is said before the passage or behind it.
_OF_TEXT = (
    "Summarize the following text in a few sentences.",
    "Summarize this in one sentence.",
    "Give a short summary and quote the most important sentence word for word.",
    "List the key points of this text.",
    "Rewrite the following text in simpler words.",
    "Rewrite this so that it sounds more formal.",
    "Correct any mistakes in the following text and write it out again.",
    "What is this text about? Answer with words from the text.",
    "Answer with the help of this text only: what is it for, and who needs it?",
    "Which names and numbers does this text mention?",
    "Explain the following to a beginner.",
    "Continue the following text.",
    "Write three questions that this text answers, and the answers.",
    "Turn this into a list.",
    "Translate the following text into French.",
    "Translate the following text into German.",
    "Translate the following text into Spanish.",
    "Translate this sentence by sentence: first the original, then Italian.",
)
_OF_CODE = (
    "Explain what this code does.",
    "Add comments to this code.",
    "Add type hints to this function and print the whole of it.",
    "Write a docstring for this function and show the complete code.",
    "Rename the variables of this function so that they say what they mean.",
    "Find and fix any bugs in the following code.",
    "Rewrite this code so that it is easier to read.",
    "Change this function so that it raises a ValueError for bad arguments.",
    "Write a unit test for this function.",
    "Convert this code to JavaScript.",
    "Complete the following code.",
)
_CODE_SHARE, _DOCUMENT_SHARE = 0.3, 0.3  # of the requests; the rest is about what the target wrote
_SHORTEST, _LONGEST = 120, 900  # characters of a passage


def make_requests(answers: Sequence[str], codes: Sequence[str], wanted: int, seed: int) -> list[str]:
    """User turns with an instruction and a passage, in an order that depends on the seed; each passage is used once.

    Args:
        answers: that the target wrote.
        codes: source files of Python, whose functions are taken, and whose docstrings are prose.
    Returns:
        At most `wanted`.
    """
    pick = random.Random(seed)
    documents = ["\n\n".join(docstrings(code)) for code in codes]
    found = (
        (_OF_CODE, [part for code in codes for part in _functions(code)], _CODE_SHARE),
        (_OF_TEXT, [part for text in documents for part in _paragraphs(text, pick)], _DOCUMENT_SHARE),
        (_OF_TEXT, [part for text in answers for part in _paragraphs(text, pick)], 1.0),
    )
    requests: list[str] = []
    for instructions, parts, share in found:
        passages = list(dict.fromkeys(parts))  # packages carry copies of one another's files
        most = min(round(share * wanted), wanted - len(requests), len(passages))
        requests += [_ask(pick.choice(instructions), part, pick) for part in pick.sample(passages, most)]
    pick.shuffle(requests)
    return requests


def _ask(instruction: str, passage: str, pick: random.Random) -> str:
    parts = [instruction, passage]
    if pick.random() < 1 / 3:
        parts.reverse()
    return "\n\n".join(parts)


def _paragraphs(text: str, pick: random.Random) -> Iterator[str]:
    """Paragraphs that follow one another, joined up to a length drawn for each passage."""
    found, most = "", pick.uniform(_SHORTEST, _LONGEST)
    for paragraph in text.replace("\r\n", "\n").split("\n\n"):
        part = paragraph.strip("\n")
        if len(found) + len(part) <= most:
            found = f"{found}\n\n{part}".strip("\n")
            continue
        if len(found) >= _SHORTEST:
            yield found
        found, most = part if len(part) <= _LONGEST else "", pick.uniform(_SHORTEST, _LONGEST)
    if len(found) >= _SHORTEST:
        yield found


def _functions(code: str) -> Iterator[str]:
    lines = code.split("\n")  # as the parser counts them: a form feed ends none
    for node in parse(code):
        if isinstance(node, ast.FunctionDef):
            part = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if _SHORTEST <= len(part) <= _LONGEST:
                yield part
