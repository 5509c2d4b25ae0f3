"""HotpotQA: questions over ten given paragraphs, two of which hold the answer (arXiv 1809.09600).

A program of two hops: a query, the paragraphs that BM25 finds for it, a second query in the light of them, and the
answer from all that was found. The score is HotpotQA's F1 (1 for an exact match); the feedback names the right answer
and the supporting titles that the queries missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import dspy

from benchmarks.workloads.answers import f1, listed
from benchmarks.workloads.definition import Definition, Pools, Size, text_of
from benchmarks.workloads.retrieval import Paragraph, retrieve
from benchmarks.workloads.rows import Hub, Row, Source, load_rows
from dspy_flashevolve.sim import LengthLaw

SOURCE = Source(
    file="hotpotqa/dev_distractor_100.jsonl",
    fields=("question", "answer", "supporting_facts", "context"),
    hub=Hub("hotpotqa/hotpot_qa", "validation[:100]", config="distractor"),
    origin="HotpotQA, the first 100 rows of the dev set, distractor setting, CC BY-SA 4.0",
)
TITLES_A_HOP = 2


def example(row: Row) -> dspy.Example:
    """A row as an example: question and paragraphs, with the answer and the supporting titles to compare with."""
    context = row["context"]
    paragraphs = [
        Paragraph(title, "".join(sentences))
        for title, sentences in zip(context["title"], context["sentences"], strict=True)
    ]
    titles = list(dict.fromkeys(row["supporting_facts"]["title"]))
    made = dspy.Example(question=row["question"], paragraphs=paragraphs, answer=row["answer"], titles=titles)
    return made.with_inputs("question", "paragraphs")


class MultiHop(dspy.Module):
    """query -> titles -> second query -> more titles -> answer.

    Args:
        titles_a_hop: How many paragraphs a query may find.
    """

    def __init__(self, titles_a_hop: int = TITLES_A_HOP) -> None:
        super().__init__()
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

    def forward(self, question: str, paragraphs: Sequence[Paragraph]) -> dspy.Prediction:
        """The answer, with both queries and the titles that each found."""
        first = self.first_query(question=question).first_query
        found = self._search(first, paragraphs)
        second = self.second_query(question=question, passages=_texts(found)).second_query
        more = self._search(second, paragraphs, found)
        answer = self.answer(question=question, passages=_texts([*found, *more])).answer
        return _prediction(first, found, second, more, answer)

    async def aforward(self, question: str, paragraphs: Sequence[Paragraph]) -> dspy.Prediction:
        """The same, awaited."""
        first = (await self.first_query.acall(question=question)).first_query
        found = self._search(first, paragraphs)
        second = (await self.second_query.acall(question=question, passages=_texts(found))).second_query
        more = self._search(second, paragraphs, found)
        answer = (await self.answer.acall(question=question, passages=_texts([*found, *more]))).answer
        return _prediction(first, found, second, more, answer)

    def _search(self, query: Any, paragraphs: Sequence[Paragraph], known: Sequence[Paragraph] = ()) -> list[Paragraph]:
        """What a query finds among the paragraphs that are not known yet."""
        return retrieve(str(query), [one for one in paragraphs if one not in known], self.titles_a_hop)


def _texts(paragraphs: Iterable[Paragraph]) -> list[str]:
    return [str(one) for one in paragraphs]


def _prediction(
    first: Any, found: Sequence[Paragraph], second: Any, more: Sequence[Paragraph], answer: Any
) -> dspy.Prediction:
    return dspy.Prediction(
        first_query=first,
        first_titles=[one.title for one in found],
        second_query=second,
        second_titles=[one.title for one in more],
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
    program=MultiHop,
    metric=metric,
    outputs={"first_query": "first_query", "second_query": "second_query", "answer.predict": "answer"},
    reply_length=LengthLaw(median_tokens=90, sigma=0.6),
)
