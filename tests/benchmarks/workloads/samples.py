"""Rows of our own in the form of the real ones, and what a program must answer to be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dspy

from benchmarks.workloads.agnews import TOPICS
from benchmarks.workloads.debian import SECTIONS
from benchmarks.workloads.symptom2disease import DISEASES

NAMES = ("agnews", "debian", "aime", "finer", "formula", "hotpotqa", "hover", "symptom2disease")
REAL_NAMES = NAMES[2:]
"""Those whose rows a data folder has. AGNews stands on a hub only, and Debian's packages are a machine's."""


def _hop_question(number: int) -> dict[str, Any]:
    place, person = f"Town{number}", f"Mayor{number}"
    others = [f"Bystander{number}x{index}" for index in range(8)]
    return {
        "question": f"When was the person born who governs the place called {place} ?",
        "answer": str(1900 + number),
        "supporting_facts": {"title": [place, person, place], "sent_id": [0, 0, 1]},
        "context": {
            "title": [*others, place, person],
            "sentences": [
                *[[f"{other} collects stamps.", " And coins."] for other in others],
                [f"{place} is governed by {person}."],
                [f"{person} was born in {1900 + number}."],
            ],
        },
    }


def _claim(number: int) -> dict[str, Any]:
    facts = [[f"Film {number} (2011 film)", 0], [f"Director {number}", 1], [f"Film {number} (2011 film)", 2]]
    label = "SUPPORTED" if number % 2 else "NOT_SUPPORTED"
    return {"claim": f"Claim {number}.", "supporting_facts": facts, "label": label, "num_hops": 2}


def _constrained(prompt: str) -> dict[str, Any]:
    kinds, arguments = ["keywords:existence"], [{"keywords": ["zebra"]}]
    return {"key": prompt, "prompt": prompt, "instruction_id_list": kinds, "kwargs": arguments}


def write_samples(folder: Path) -> None:
    """Every file that the workloads read; one question stands in two splits, as in FiNER."""
    _write(folder / "hotpotqa/dev_distractor_100.jsonl", [_hop_question(number) for number in range(30)])
    _write(folder / "hover/dev_600.jsonl", [_claim(number) for number in range(30)])
    for year in (2024, 2025):
        rows = [{"problem": f"Problem {number} of {year}.", "answer": f"{number:03d}"} for number in range(30)]
        _write(folder / f"aime/aime{year}.jsonl", rows)
    for path, count in (("ifeval/input_data", 20), ("ifbench/test", 4)):
        _write(folder / f"{path}.jsonl", [_constrained(f"{path} {number}") for number in range(count)])
    packages = [{"question": f"Package {n}.", "answer": SECTIONS[n % 4]} for n in range(40)]
    _write(folder / "debian/packages.jsonl", packages)
    for start, split in ((0, "train"), (11, "val"), (24, "test")):
        numbers = range(start, start + 12)
        formula = [{"context": f"What is {n} / 4?", "target": str(n / 4)} for n in numbers]
        finer = [{"context": f"Tags: A,B,C,D{n}. Which has {n}?", "target": f"A,B,C,D{n}"} for n in numbers]
        symptoms = [{"question": f"Symptom {n}.", "answer": DISEASES[n % 22]} for n in numbers]
        news = [{"question": f"News {n}.", "answer": TOPICS[n % 4]} for n in numbers]
        for name, rows in (("agnews", news), ("formula", formula), ("finer", finer), ("symptom2disease", symptoms)):
            _write(folder / name / f"{split}.jsonl", rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def right_outputs(name: str, example: dspy.Example) -> dict[str, str]:
    """What the predictors must write for a score of 1."""
    if name == "hotpotqa":
        first, second = example.titles
        return {"first_query": first, "second_query": second, "answer": example.answer}
    if name == "hover":
        return {"hops": "\n".join(f"{title}: holds" for title in example.titles), "verdict": example.label}
    output, field = {
        "agnews": ("topic", "topic"),
        "debian": ("section", "section"),
        "aime": ("answer", "answer"),
        "formula": ("answer", "target"),
        "finer": ("tags", "target"),
        "symptom2disease": ("disease", "disease"),
    }[name]
    return {output: example[field]}


def wrong_outputs(name: str) -> dict[str, str]:
    """What scores 0 whatever is asked."""
    return {
        "agnews": {"topic": "zzz"},
        "debian": {"section": "zzz"},
        "hotpotqa": {"first_query": "zzz", "second_query": "zzz", "answer": "zzz"},
        "hover": {"hops": "zzz", "verdict": "zzz"},
        "aime": {"answer": "-1"},
        "formula": {"answer": "-1"},
        "finer": {"tags": "zzz"},
        "symptom2disease": {"disease": "zzz"},
    }[name]
