"""The benchmark with a real task model and a scripted reflection LM: its task, its reflector, its runs and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.teleprompt.gepa.instruction_proposal import ProposeInstruction

from benchmarks import real_model
from benchmarks.methods import Limits
from benchmarks.real_model import Job, Setting
from benchmarks.scripted_reflection import ScriptedReflection
from benchmarks.workloads.definition import Size
from benchmarks.workloads.house_style import INSTRUCTION, STYLE, Metric, examples, from_rules, to_rules
from dspy_flashevolve.engine.staleness import StaleChild
from dspy_flashevolve.modules.integrate import StaleCandidateReflection
from dspy_flashevolve.sim import SimServer
from dspy_flashevolve.sim.reply_model import ReplyModel

SENTENCES = [sentence for one in STYLE for sentence in one.wordings]
KIND = ReplyModel(useless=0.0, rules_added=None, forgets=0.0, overload=0.0)


def test_the_style_has_twelve_constraints_or_more_and_no_sentence_is_part_of_another() -> None:
    assert len(STYLE) >= 12
    assert not [(one, other) for one in SENTENCES for other in SENTENCES if one is not other and one in other]


@pytest.mark.parametrize("write", [str, lambda text: json.dumps(text)[1:-1]], ids=["plain", "as in JSON"])
def test_sentences_come_back_from_the_rules_that_stand_for_them(write: Any) -> None:
    text = "\n".join(["Answer.", *SENTENCES, "Thanks."])
    assert from_rules(write(to_rules(text))) == write(text)
    assert to_rules(text) != text


def test_each_constraint_can_be_missed_and_met() -> None:
    missed, met = (
        "Well, I think: " + "one two three four " * 8,
        "weekend honest coffee!!! YES? [name] <<Tip>> p.s. good luck!",
    )
    assert [one.wordings[0] for one in STYLE if one.met(missed)] == []
    lowercase = [one.wordings[0] for one in STYLE if not one.met(met)]
    assert lowercase == ["Write everything in CAPITAL letters."]
    assert all(one.met(met.upper()) for one in STYLE)


def test_the_metric_scores_the_share_that_holds_and_names_what_was_missed() -> None:
    gold = dspy.Example(request="Why?")
    outcome = Metric(KIND)(gold, dspy.Prediction(text="an honest answer without anything else"))
    named = [one for one in STYLE if one.wordings[0] in outcome.feedback]
    assert outcome.score == pytest.approx(1 - len(named) / len(STYLE))
    assert STYLE[0] not in named
    vague = Metric(ReplyModel(vague=1.0))(gold, dspy.Prediction(text="an honest answer"))
    assert not any(sentence in vague.feedback for sentence in SENTENCES)


def test_no_question_of_the_true_score_is_in_another_split_of_any_seed() -> None:
    size = Size(20, 20, 40)
    tested = {one.request for one in examples(size, 0)[2]}
    for seed in range(3):
        train, val, test = ({one.request for one in part} for part in examples(size, seed))
        assert test == tested
        assert not test & (train | val)
        assert not train & val
    with pytest.raises(ValueError, match="192"):
        examples(Size(100, 100, 0), 0)


def test_a_reflection_writes_the_sentences_that_its_feedback_names() -> None:
    reflector = ScriptedReflection(KIND, "h100-qwen3-8b", 0, pace=0.0)
    feedback = f"Missed: {STYLE[0].wordings[0]} {STYLE[5].wordings[0]}"
    with dspy.context(lm=reflector.lm()):
        made = dspy.Predict(ProposeInstruction)(
            current_instruction=INSTRUCTION, examples_with_feedback=[{"Inputs": {}, "Feedback": feedback}]
        )
    assert made.new_instruction.splitlines() == [INSTRUCTION, STYLE[0].wordings[0], STYLE[5].wordings[0]]
    assert reflector.calls == 1
    assert reflector.tokens > 100


def test_an_integration_joins_sentences_of_several_children() -> None:
    head = {"write": INSTRUCTION}
    children = [
        StaleChild(number, {"write": f"{INSTRUCTION}\n{one.wordings[0]}"}, head, score_before=0.1)
        for number, one in enumerate(STYLE[:3], start=1)
    ]
    with dspy.context(lm=ScriptedReflection(KIND, "h100-qwen3-8b", 0, pace=0.0).lm()):
        made = StaleCandidateReflection()(head=head, children=children)
    assert made.texts["write"].splitlines() == [INSTRUCTION, *(one.wordings[0] for one in STYLE[:3])]


def test_runs_leave_rows_with_true_scores_and_tokens_and_are_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, details = tmp_path / "rows.jsonl", tmp_path / "details.jsonl"
    with SimServer(profile="h100-qwen3-8b", time_scale=500.0) as server:
        command = ["--api-base", server.api_base, "--model", "simulated", "--methods", "gepa", "async", "--calls", "30"]
        command += ["--seconds", "0", "--seeds", "1", "--slots", "8", "--train", "4", "--val", "4", "--test", "3"]
        command += ["--samples", "1", "--reflection-pace", "0", "--out", str(out), "--details", str(details)]
        assert real_model.main(command) == 0
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert real_model.main(command) == 0
    assert len(out.read_text().splitlines()) == 2
    assert [line["method"] for line in lines] == ["gepa", "async"]
    for line in lines:
        assert line["commit"] != ""
        assert 0 <= line["seed_true_score"] <= line["true_score"] + 0.5
        assert min(line["prompt_tokens"], line["completion_tokens"]) > 0
        assert line["reflection_tokens"] > line["reflections"] > 0
    assert lines[1]["total_metric_calls"] <= 30
    printed = capsys.readouterr().out
    assert "30 metric calls on simulated" in printed
    assert real_model.main(["--report", str(out)]) == 0
    assert capsys.readouterr().out.strip() in printed


def test_each_constraint_is_measured_alone() -> None:
    with SimServer(profile="h100-qwen3-8b", time_scale=500.0) as server:
        setting = Setting(server.api_base, "simulated", Size(0, 0, 2), samples=1)
        found = real_model.alone(setting, threads=4)
    assert [line[0] for line in found] == [one.wordings[0] for one in STYLE]
    assert found[0][2:] == ["1.00", "1.00", "1.00"]  # the simulated model writes no comma


def test_runs_at_equal_seconds_have_a_name_of_their_own() -> None:
    job = Job(Setting(), Limits(8, 1, seconds=90.0), "async")
    assert job.blank.key.benchmark == "real_model-90s"
    assert job.blank.key != Job(Setting(), Limits(8, 1, seconds=60.0), "async").blank.key
    assert job.blank.key != Job(Setting(temperature=0.0), Limits(8, 1, seconds=90.0), "async").blank.key
