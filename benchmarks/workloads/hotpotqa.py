"""HotpotQA: questions whose answer needs two paragraphs of a small corpus (arXiv 1809.09600).

The corpus holds the ten paragraphs of each of the 100 rows, 991 different ones: two with the answer, and eight that
HotpotQA chose to distract. A program of two hops searches it: a query, the paragraphs that BM25 finds for it, a second
query in the light of them, and the answer from all that was found. The score is HotpotQA's F1 (1 for an exact match);
the feedback names the right answer and the supporting titles that the queries missed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import dspy

from benchmarks.workloads.answers import f1, listed
from benchmarks.workloads.definition import Definition, Pools, Size, text_of
from benchmarks.workloads.retrieval import Corpus, Paragraph
from benchmarks.workloads.rows import Hub, Row, Source, load_rows
from dspy_flashevolve.sim import LengthLaw

SOURCE = Source(
    file="hotpotqa/dev_distractor_100.jsonl",
    fields=("question", "answer", "supporting_facts", "context"),
    hub=Hub("hotpotqa/hotpot_qa", "validation[:100]", config="distractor"),
    origin="HotpotQA, the first 100 rows of the dev set, distractor setting, CC BY-SA 4.0",
)
TITLES_A_HOP = 3
"""With the question itself as the query, three paragraphs of the corpus hold 64% of the supporting ones: as many as two
of a row's own ten would. Two of the corpus hold 55%."""


def example(row: Row) -> dspy.Example:
    """A row as an example: the question, with the answer and the supporting titles to compare with."""
    titles = list(dict.fromkeys(row["supporting_facts"]["title"]))
    return dspy.Example(question=row["question"], answer=row["answer"], titles=titles).with_inputs("question")


def paragraphs_of(row: Row) -> list[Paragraph]:
    """The ten paragraphs of a row."""
    context = row["context"]
    pairs = zip(context["title"], context["sentences"], strict=True)
    return [Paragraph(title, "".join(sentences)) for title, sentences in pairs]


@functools.lru_cache(maxsize=1)
def corpus_of(paragraphs: tuple[Paragraph, ...]) -> Corpus:
    """The corpus of these paragraphs, which every program shares."""
    return Corpus(paragraphs)


def program() -> MultiHop:
    """The program over the paragraphs of all rows.

    Raises:
        ImportError: bm25s is not installed.
        RowsMissing: The rows are nowhere.
    """
    return MultiHop(corpus_of(tuple(paragraph for row in load_rows(SOURCE) for paragraph in paragraphs_of(row))))


class MultiHop(dspy.Module):
    """query -> titles -> second query -> more titles -> answer.

    Args:
        corpus: What the queries search. It is no part of dspy's state: `load` reads the state into a program that was
            made with its corpus.
        titles_a_hop: How many paragraphs a query may find.
    """

    def __init__(self, corpus: Corpus, titles_a_hop: int = TITLES_A_HOP) -> None:
        super().__init__()
        self.corpus = corpus
        self.titles_a_hop = titles_a_hop
        self.first_query = dspy.Predict(
            dspy.Signature("question -> first_query", "Write a search query that finds what the question is about.")
        )
        self.second_query = dspy.Predict(
            dspy.Signature(
                "question, passages: list[str] -> second_query",
                "Write a search query that finds what the passages do not tell yet.",
            )
        )
        self.answer = dspy.ChainOfThought(
            dspy.Signature(
                "question, passages: list[str] -> answer",
                "Answer the question from the passages in as few words as possible.",
            )
        )

    def forward(self, question: str) -> dspy.Prediction:
        """The answer, with both queries and the titles that each found."""
        first = self.first_query(question=question).first_query
        found = self._search(first)
        second = self.second_query(question=question, passages=_texts(found)).second_query
        more = self._search(second, found)
        answer = self.answer(question=question, passages=_texts([*found, *more])).answer
        return _prediction(first, found, second, more, answer)

    async def aforward(self, question: str) -> dspy.Prediction:
        """The same, awaited."""
        first = (await self.first_query.acall(question=question)).first_query
        found = self._search(first)
        second = (await self.second_query.acall(question=question, passages=_texts(found))).second_query
        more = self._search(second, found)
        answer = (await self.answer.acall(question=question, passages=_texts([*found, *more]))).answer
        return _prediction(first, found, second, more, answer)

    def _search(self, query: Any, known: Sequence[Paragraph] = ()) -> list[Paragraph]:
        """What a query finds among the paragraphs that are not known yet."""
        return self.corpus.search(str(query), self.titles_a_hop, known)


def _texts(paragraphs: Iterable[Paragraph]) -> list[str]:
    return [str(paragraph) for paragraph in paragraphs]


def _prediction(
    first: Any, found: Sequence[Paragraph], second: Any, more: Sequence[Paragraph], answer: Any
) -> dspy.Prediction:
    return dspy.Prediction(
        first_query=first,
        first_titles=[paragraph.title for paragraph in found],
        second_query=second,
        second_titles=[paragraph.title for paragraph in more],
        answer=answer,
    )


def metric(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """F1 of the answer; the feedback names the right answer, and the supporting titles that were missed."""
    answer, right = text_of(pred, "answer"), str(gold.answer)
    score = f1(answer, right)
    first = list(pred.get("first_titles") or [])
    found = first if pred_name == "first_query" else [*first, *(pred.get("second_titles") or [])]
    said = "The answer is right." if score == 1 else f'The answer "{answer}" is wrong: the right one is "{right}".'
    feedback = f"{said} {_on_titles(gold.titles, found)}"
    return dspy.Prediction(score=score, feedback=feedback)


def _on_titles(wanted: Sequence[str], found: Sequence[str]) -> str:
    missed = [title for title in wanted if title not in found]
    if not missed:
        return f"The search found both supporting paragraphs, {listed(wanted)}."
    return f"The search found {listed(found) or 'nothing'} and missed the supporting paragraphs {listed(missed)}."


DEFINITION = Definition(
    name="hotpotqa",
    size=Size(train=40, val=40, test=20),
    pools=lambda: Pools([example(row) for row in load_rows(SOURCE)]),
    question="question",
    program=program,
    metric=metric,
    outputs={"first_query": "first_query", "second_query": "second_query", "answer.predict": "answer"},
    reply_length=LengthLaw(median_tokens=26, sigma=0.6),
    reflection_length=LengthLaw(median_tokens=1040, sigma=0.5),
)
