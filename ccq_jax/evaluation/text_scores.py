"""Scores of a generated text against a right one, from 0 to 1, as LongBench and the recall tasks use them.

LongBench: arXiv 2308.14508. Its ROUGE-L is that of the package `rouge` (of a summary's sentences, by
the union of their longest common subsequences), its edit similarity that of `fuzzywuzzy`.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous spaces: SQuAD's form of an answer."""
    text = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION))
    return " ".join(text.split())


def f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the words of two normalised texts."""
    found, wanted = normalise(text).split(), normalise(answer).split()
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def contains(text: str, answers: Sequence[str]) -> float:
    """1 if one of the answers is in the text, in whatever case."""
    return float(any(answer.lower() in text.lower() for answer in answers))


def classification(text: str, answer: str, classes: Sequence[str]) -> float:
    """1 / n if the text names n classes and the right one among them.

    A class that is only part of the right one's name is not counted.
    """
    named = [name for name in classes if name in text]
    named = [name for name in named if name == answer or name not in answer]
    return 1 / len(named) if answer in named else 0.0


def edit_similarity(text: str, answer: str) -> float:
    """Of the text's first line that is code, 2 matches / length of both, in whole hundredths."""
    lines = text.lstrip("\n").split("\n")
    code = next((s for s in lines if not any(mark in s for mark in ("`", "#", "//"))), "")
    if not code or not answer:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, code, answer).ratio()) / 100


def rouge_l(text: str, answer: str) -> float:
    """F of ROUGE-L between two texts of sentences."""
    found, wanted = _sentences(text), _sentences(answer)
    if not found or not wanted:
        return 0.0
    union = {word for sentence in wanted for other in found for word in _common(sentence, other)}
    precision = len(union) / len({word for sentence in found for word in sentence})
    recall = len(union) / len({word for sentence in wanted for word in sentence})
    return 2 * precision * recall / (precision + recall) if union else 0.0


def _sentences(text: str) -> list[list[str]]:
    return [words for part in text.split(".") if (words := part.split())]


def _common(a: list[str], b: list[str]) -> list[str]:
    """A longest common subsequence of words."""
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a, 1):
        above, row = lengths[i - 1], lengths[i]
        for j, y in enumerate(b, 1):
            row[j] = above[j - 1] + 1 if x == y else max(above[j], row[j - 1])
    i, j, words = len(a), len(b), []
    while i and j:
        if a[i - 1] == b[j - 1]:
            words.append(a[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words[::-1]
