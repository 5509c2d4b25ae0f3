"""Optimizers judged on a test set: the task model that reads its prompt, and the model whose replies are files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import dspy
import pytest

from benchmarks import file_lm
from benchmarks.local_http import serving
from benchmarks.run import chosen, main, standard_error
from benchmarks.text_student import TextStudent
from benchmarks.workloads import symptom2disease_coded
from benchmarks.workloads.symptom2disease import DISEASES

SYMPTOMS = {
    "allergy": "sneezing eyes water pollen", "migraine": "throbbing headache bright light",
    "dengue": "mosquito joints fever", "malaria": "shivering sweating chills",
}  # fmt: skip


def example(question: str, answer: str) -> dspy.Example:
    return dspy.Example(question=question, answer=answer).with_inputs("question")


EXAMPLES = [example(f"I have {words} {n}", f"K{10 + i}") for i, words in enumerate(SYMPTOMS.values()) for n in "abcd"]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with made-up rows in the form of Symptom2Disease."""
    folder = tmp_path / "data" / "symptom2disease"
    folder.mkdir(parents=True)
    for split, count in {"train": 6, "val": 2, "test": 3}.items():
        lines = [
            json.dumps({"question": f"I have {words}, {split} {n}.", "answer": disease})
            for disease, words in SYMPTOMS.items()
            for n in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path / "data"))
    return tmp_path


# The task model


def test_the_student_knows_what_its_instruction_says_and_nothing_else() -> None:
    student = TextStudent(EXAMPLES)
    assert student.answer("Give the class of the text.", "I have a throbbing headache") == "unknown class"
    told = "Answer with the exact code.\n- K10: sneezing, eyes water.\n- K11: throbbing headache."
    assert student.answer(told, "I have a throbbing headache") == "K11"
    assert student.answer(told, "My eyes water, I am sneezing") == "K10"


def test_a_part_that_names_many_labels_says_less_of_each_than_one_of_its_own() -> None:
    student = TextStudent(EXAMPLES)
    crowded = "Answer with the exact code.\nK10, K12 and K13: throbbing headache.\n- K11: headache."
    assert student.answer(crowded, "headache") == "K11"


def test_an_answer_is_a_function_of_instruction_and_question() -> None:
    text = "- K10: sneezing.\n- K11: headache."
    answers = {TextStudent(EXAMPLES).answer(text, "I have a headache") for _ in range(5)}
    assert len(answers) == 1


def test_the_student_answers_dspys_requests_over_http() -> None:
    student = TextStudent(EXAMPLES)
    with serving(student.reply) as base:
        lm = dspy.LM("openai/text-student", api_base=base, api_key="none", cache=False)
        program = dspy.Predict(
            dspy.Signature("question -> answer", "Answer with the code.\n- K11: throbbing headache.")
        )
        with dspy.context(lm=lm):
            assert program(question="a throbbing headache").answer == "K11"


def test_each_seed_of_the_coded_workload_has_codes_of_its_own() -> None:
    first, second = symptom2disease_coded.codes("a 0"), symptom2disease_coded.codes("a 1")
    assert first.keys() == set(DISEASES)
    assert len(set(first.values())) == len(DISEASES)
    assert first != second
    assert first == symptom2disease_coded.codes("a 0")


# The model whose replies are files


def test_a_request_becomes_a_file_and_its_reply_file_the_answer(tmp_path: Path) -> None:
    async def ask() -> str:
        asked = asyncio.create_task(
            file_lm.FileModel(tmp_path / "run").reply([("system", "Be brief."), ("user", "Hi")])
        )
        while not (request := tmp_path / "run" / "0001.request.txt").exists():  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert request.read_text() == "[system]\nBe brief.\n\n[user]\nHi"
        file_lm.write(tmp_path / "run" / "0001.reply.txt", "Hello.\n")
        return await asked

    assert asyncio.run(ask()) == "Hello."
    [row] = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert json.loads(row)["reply"] == len("Hello.")


def test_a_request_is_claimed_once_and_the_oldest_of_all_runs_first(tmp_path: Path) -> None:
    for seconds, name in enumerate(["b/0001", "a/0001", "b/0002"]):
        path = tmp_path / f"{name}.request.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
        os.utime(path, (seconds, seconds))
    claimed = [file_lm.claim(tmp_path) for _ in range(4)]
    assert [path and path.read_text() for path in claimed] == ["b/0001", "a/0001", "b/0002", None]


def test_whoever_waits_is_told_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert file_lm.main(["end", str(tmp_path)]) == 0
    assert file_lm.main(["next", str(tmp_path)]) == 0
    assert "FINISHED" in capsys.readouterr().out
    assert file_lm.main(["wrong"]) == 2


# The command


def answering(folder: Path, stop: threading.Event) -> None:
    """Plays a reflection LM: writes down the examples that a request shows, as edits or as a whole text."""
    while not stop.wait(0.01):
        request = file_lm.claim(folder) if folder.exists() else None
        if request is None:
            continue
        lines = [f"- K{n}: {words}" for n, words in _shown(request.read_text())]
        reply = {"edits": [{"action": "add", "part": 1, "text": line} for line in lines]}
        whole = {"new_instruction": "\n".join(["Answer with the exact code.", *lines])}
        text = json.dumps(reply if "`edits`" in request.read_text() else whole)
        file_lm.write(file_lm.reply_path(request), text)


def _shown(prompt: str) -> list[tuple[str, str]]:
    """The codes that feedback names, each with the words of its question."""
    found = re.findall(r"I have ([a-z ]+), train[^}]*\}.*?expected answer is 'K(\d+)'", prompt, re.DOTALL)
    return [(code, words) for words, code in found]


@pytest.fixture
def answered(rows: Path) -> Any:
    stop, folder = threading.Event(), rows / "files"
    thread = threading.Thread(target=answering, args=(folder, stop), daemon=True)
    thread.start()
    yield f"file:{folder}"
    stop.set()
    thread.join()


def test_the_command_writes_a_row_a_run_and_goes_on_where_it_stopped(
    rows: Path, answered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = rows / "rows.jsonl"
    sizes = ["--train", "20", "--val", "6", "--test", "10", "--reply-seconds", "0", "--calls", "60", "--seeds", "0"]
    command = ["symptom2disease-coded", "--reflection-model", answered, *sizes, "--out", str(out)]
    assert main([*command, "--methods", "gepa", "async"]) == 0
    first = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["method"] for row in first} == {"gepa", "async"}
    for row in first:
        assert 0 <= row["test"] <= 1
        assert row["reflections"] > 0
        assert row["candidates"][0]["texts"] == {"self": "Give the class of the text."}
        assert row["returned"]["self"] in [candidate["texts"]["self"] for candidate in row["candidates"]]
        assert "commit" in row
    assert main([*command, "--methods", "gepa", "async"]) == 0
    assert len(out.read_text().splitlines()) == 2, "what the file has is not run again"
    assert "gepa " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["aime", "--reflection-model", "x", "--calls", "9"], "the text student knows"),
        (["symptom2disease-coded", "--reflection-model", "x"], "a run needs an end"),
        (["symptom2disease-coded", "--reflection-model", "x", "--calls", "9", "--methods", "best"], "unknown method"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_is_asked(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert complaint in capsys.readouterr().err


def test_dspy_gepa_can_be_asked_for_edits() -> None:
    assert chosen("gepa-edits").name == "gepa-edits"


def test_the_standard_error_is_that_of_a_mean() -> None:
    assert standard_error([0.0, 1.0, 0.0, 1.0]) == pytest.approx((1 / 3) ** 0.5 / 2)
