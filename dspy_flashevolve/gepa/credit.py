"""Credit assignment: what each change to the prompts is worth, from all rollouts at once.

    score(candidate, example) = level(example) + sum of effect(change) over the changes in the candidate + noise

This is a linear mixed model. Effects and levels are estimated together, as best linear unbiased predictions (Henderson
1975): levels of examples have a prior around a common mean, so that an easy example is not taken for a good change, and
they are eliminated before the effects are solved for. The noise is the spread of scores within examples, pooled. The
effects have a normal prior whose mean and spread are themselves estimated from the same rollouts (empirical Bayes):
where changes mostly help, new ones are trusted at once; where many harm, few are tried at a time. The prior's mean
begins slightly above 0, since no change would join the head untested otherwise.

Every rollout of a candidate is evidence on all changes in it. Steps start from variants of the head, each without some
of the changes of which little is known, so that the rollouts that reflection needs anyway form a screening design
(Plackett and Burman 1946). Effects are taken to add up; where they do not, heads bring nothing and are doubted
(heads.py). The head has every change whose posterior mean is above 0, one of each set of rivals, the best first.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspy_flashevolve.engine.journal import hash_of
from dspy_flashevolve.engine.staleness import Texts
from dspy_flashevolve.gepa.changes import Change, Edit, Weave, is_too_long
from dspy_flashevolve.observe.statistics import ChangeRecord

Array = NDArray[np.float64]

PRIOR_MEAN, PRIOR_SD = 1 / 30, 1 / 10
"""Prior mean and standard deviation of a change's effect, in units of the noise (the standard deviation of a rollout's
score on one example): .01 and .03 for scores of 0 and 1. With a mean of 0 no change would join the head untested."""
PRIOR_WEIGHT = 6.0
"""Number of changes that the prior mean counts as where it is estimated anew, so that the first few changes do not
decide whether all later ones are trusted."""
SPREADS = (1 / 6, 1 / 3, 2 / 3, 1.0, 5 / 3, 8 / 3, 4.0)
"""Standard deviations of effects among which the likeliest is chosen (empirical Bayes), in units of `PRIOR_SD`: from
changes that hardly matter to a few that decide everything."""
EXAMPLE_SD = 0.25
"""Prior standard deviation of examples' mean scores, as a share of the range of scores: about that of a uniform
distribution (.29), so that an example with few rollouts is drawn to the common mean, and one with many is not."""
FIRST_NOISE = 0.3
"""Noise, as a share of the range of scores, until there are rollouts to measure it: that of a score of 0 or 1 which is
right nine times in ten."""
HELPS, HARMS, HARMS_MUCH = 1.0, -0.7, -1.5
"""Effects, in their standard errors, from which a change counts as known to help, or to harm. A change that seems to
harm is left out sooner than one that seems to help is always put in: in a variant it costs the score of all others."""
SCORE_BOUND = 1e6
"""Scores are bounded by this times their range, so that nonsense does not overflow."""
LAST_CHILDREN = 8
"""Number of children by which a reflection LM is said to add to its parents or to rewrite them: enough that one odd
reply does not turn the search, and few enough to see that later children keep more of a prompt than the first ones."""
RETESTED = 0.03
"""Share of the variants in which a change is tested against what is known of it, since the base and the prior move."""


@dataclass(frozen=True, slots=True)
class Effects:
    """Estimates for changes, in the order of the changes.

    Args:
        mean: expected effects on the score.
        error: their standard errors.
        prior: mean and standard deviation of the effects of changes of which nothing is known.
    """

    mean: Array
    error: Array
    prior: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Head:
    """The base with all changes that are expected to help, by all evidence so far.

    Args:
        candidate: its texts.
        changes: numbers of the changes in it.
        gain: what it is expected to bring over the last validated head, in score.
    """

    candidate: Texts
    changes: frozenset[int]
    gain: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What admission reads of the changes while the pool's writer works on them; never changed, only replaced.

    Args:
        joins: whether children come as edits; False where more of the last ones are whole texts, None before the first.
        is_grown: the head joins what several children added to one text, as far as the last estimate tells.
    """

    joins: bool | None = None
    is_grown: bool = False


class Evidence:
    """Scores of compositions, sets of changes, on examples."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: list[tuple[int, int, float]] = []
        self._examples: dict[Hashable, int] = {}
        self._compositions: dict[frozenset[int], int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, example: Hashable, composition: frozenset[int], score: float) -> None:
        """Take in one rollout's score, from any thread, unless it is no finite number."""
        if not math.isfinite(score):
            return
        with self._lock:
            row = self._examples.setdefault(example, len(self._examples))
            column = self._compositions.setdefault(composition, len(self._compositions))
            self._rows.append((row, column, score))

    def effects(self, changes: int, scale: float) -> Effects:
        """Estimate the effects of changes number 0 to ``changes`` - 1; ``scale`` is the range of scores."""
        with self._lock:
            table = np.array(self._rows)
            examples, known = len(self._examples), list(self._compositions)
        rows, columns = table[:, 0].astype(np.intp), table[:, 1].astype(np.intp)
        scores = np.clip(table[:, 2], -SCORE_BOUND * scale, SCORE_BOUND * scale)
        compositions = len(known)
        design = np.zeros((compositions, changes))
        for row, composition in enumerate(known):
            design[row, list(composition)] = 1.0
        of_example = np.bincount(rows, minlength=examples).astype(float)
        totals = np.bincount(rows, scores, minlength=examples).astype(np.float64)
        noise = _noise(rows, scores, of_example, totals, scale)
        # The levels of examples, and their common mean, are eliminated (absorbed) from the normal equations.
        weight = 1 / (of_example + (noise / (EXAMPLE_SD * scale)) ** 2)
        order, first = np.argsort(rows, kind="stable"), np.searchsorted(np.sort(rows), np.arange(examples))
        per_example = np.add.reduceat(design[columns[order]], first)
        information = (design.T * np.bincount(columns, minlength=compositions)) @ design
        information -= (per_example.T * weight) @ per_example
        pull = design.T @ np.bincount(columns, scores, minlength=compositions) - per_example.T @ (weight * totals)
        cross, own = per_example.T @ (1 - weight * of_example), of_example * (1 - weight * of_example)
        mean_of_all = max(float(own.sum()), 1e-12)
        information -= np.outer(cross, cross) / mean_of_all
        pull -= cross * float((totals * (1 - weight * of_example)).sum()) / mean_of_all
        return posterior(information / noise**2, pull / noise**2, noise)


def _noise(rows: NDArray[np.intp], scores: Array, of_example: Array, totals: Array, scale: float) -> float:
    """Estimate the standard deviation of a rollout's score on one example."""
    freedom = len(scores) - len(of_example)
    if freedom < 20:
        return FIRST_NOISE * scale
    centred = scores - (totals / of_example)[rows]
    return max(0.02 * scale, math.sqrt(float(centred @ centred) / freedom))


def posterior(information: Array, pull: Array, noise: float) -> Effects:
    """Estimate effects from the normal equations of a linear model; the prior's mean and spread are estimated, too.

    Args:
        information: precision matrix of the effects, by the rollouts alone.
        pull: the same times the least squares estimate.
        noise: standard deviation of a rollout's score.
    """
    size = len(pull)
    values, vectors = np.linalg.eigh(information)
    known = values > 1e-6 * max(noise**-2, float(values.max(initial=0.0)))
    ones = (vectors.T @ np.ones(size))[known]
    variance = 1 / values[known]
    estimate = (vectors.T @ pull)[known] * variance
    first, unit = PRIOR_MEAN * noise, PRIOR_SD * noise
    strength = PRIOR_WEIGHT / unit**2
    best, spread, mean = -math.inf, unit, first
    for factor in SPREADS:
        total = (factor * unit) ** 2 + variance
        centre = float(((ones * estimate / total).sum() + strength * first) / ((ones**2 / total).sum() + strength))
        likelihood = -0.5 * float((np.log(total) + (estimate - centre * ones) ** 2 / total).sum())
        likelihood -= 0.5 * strength * (centre - first) ** 2 + 0.5 * (math.log(factor) / 0.7) ** 2
        if likelihood > best:
            best, spread, mean = likelihood, factor * unit, centre
    covariance = np.linalg.inv(information + np.eye(size) / spread**2)
    return Effects(covariance @ (pull + mean / spread**2), np.sqrt(np.diag(covariance)), (mean, spread))


class Credit:
    """Estimates what each change is worth, and composes candidates of changes: variants to learn from, and the head.

    Everything but :meth:`record_score` runs in the pool's writer; :attr:`outlook` is what others may read.

    Args:
        seed: component -> text, on which changes are put.
        scale: the range of scores.
        most_characters: of a candidate's texts together; None for no limit.
        most_each: of each text that is joined; None for no limit.
    """

    def __init__(
        self, seed: Texts, scale: float, most_characters: int | None = None, most_each: int | None = None
    ) -> None:
        self._most_characters, self._most_each = most_characters, most_each
        self.scale = scale
        self._former: list[ChangeRecord] = []
        """Changes of former bases, with their last estimates."""
        self.parent = 0
        """The pool's index of the last validated head."""
        self._children = deque[tuple[int, bool]](maxlen=LAST_CHILDREN)
        """Step and whether its child was written as a whole text, of the last children."""
        self.outlook = Outlook()
        self._grown = set[str]()
        """Texts, as hashes, each with its component's name, that have grown; see :meth:`grown_in`."""
        self._written_anew = set[str]()
        """Texts, as hashes, that the reflection LM was asked to write anew."""
        self._begin(Weave(seed), [])

    def _begin(self, weave: Weave, steps: list[int]) -> None:
        """Begin anew with the changes of a weave, each with the step that made it, and without any evidence."""
        noise = FIRST_NOISE * self.scale
        self._weave, self._steps = weave, steps
        self._compositions: dict[str, frozenset[int]] = {hash_of(weave.base): frozenset()}
        self._evidence, self._fitted = Evidence(), 0
        self._effects = Effects(np.zeros(0), np.zeros(0), (PRIOR_MEAN * noise, PRIOR_SD * noise))
        self._recorded = self._compositions, self._evidence
        """What :meth:`record_score` reads on the loop: replaced as a whole, so that it never mixes two bases."""
        self._tried: dict[int, frozenset[int]] = {}
        """Step that validates a head, or has -> the head's changes, the newest last."""

    def record_score(self, candidate: str, split: str, example: Hashable, score: float) -> None:
        """Take the score of a rollout as evidence, where the candidate, a hash of texts, is made of known changes."""
        compositions, evidence = self._recorded
        composition = compositions.get(candidate)
        if composition is not None:
            evidence.add((split, example), composition, score)

    def record_children(self, step: int, are_whole: Iterable[bool]) -> None:
        """Count once which of a step's children were written as whole texts, whatever becomes of them."""
        if all(number != step for number, _ in self._children):
            self._children.extend((step, is_whole) for is_whole in are_whole)
            self._publish()

    def _publish(self) -> None:
        """Replace :attr:`outlook` by how the children and the head are now."""
        whole = [is_whole for _, is_whole in self._children]
        self.outlook = Outlook(2 * sum(whole) <= len(whole) if whole else None, bool(self._joined(self._best())))

    def variant(self, rng: random.Random) -> Texts:
        """Compose a candidate that tests changes: the head with and without some of those of unknown effect."""
        self._refit()
        chosen: list[int] = []
        for number, (mean, error) in enumerate(self._estimates()):
            ratio = mean / error
            chance = (
                1 - RETESTED if ratio > HELPS else 0.0 if ratio < HARMS_MUCH else RETESTED if ratio < HARMS else 0.5
            )
            if rng.random() < chance:
                chosen.append(number)
        rng.shuffle(chosen)
        return self._compose(self._that_fit(chosen))

    @property
    def _changes(self) -> list[Change]:
        return self._weave.changes

    def take(
        self,
        step: int,
        parent: Texts,
        child: Texts,
        edits: Mapping[str, Iterable[Edit]],
        split: str,
        scores: Mapping[str, float],
    ) -> bool:
        """Take in the edits of a child; False where changes do not stand on its parent, and it stands for itself.

        Args:
            step: that made it.
            parent, child: their texts.
            edits: component -> edits of the parent that make the child.
            split, scores: what the child had on its screen.
        """
        self.mark_grown(child, self.grown_in(parent))
        composition = self._compositions.get(hash_of(parent))
        composition = None if composition is None else self._weave.take(composition, edits)
        if composition is None:
            return False
        self._steps += [step] * (len(self._changes) - len(self._steps))
        composed = self._weave.compose(composition)
        # A change that another child has made already stands where that one put it: lines may be in another order.
        if all(sorted(composed[name].split()) == sorted(text.split()) for name, text in child.items()):
            self._record_composition(child, composition)
            for example, score in scores.items():
                self._evidence.add((split, example), composition, score)
        self._publish()
        return True

    def head(self) -> Head:
        """Compose the base with all changes that are expected to help."""
        self._refit()
        mean, chosen = [mean for mean, _ in self._estimates()], self._that_fit(self._best())
        last = next(reversed(self._tried.values()), frozenset[int]())
        gain = sum(mean[number] for number in chosen - last) - sum(mean[number] for number in last - chosen)
        return Head(self._compose(chosen), chosen, gain)

    def effects_in_grown(self, texts: Texts, least: int) -> dict[str, list[tuple[str, float, float]]]:
        """Find the components of a candidate that have grown and have at least ``least`` changes.

        Returns:
            Component -> for each of its changes the part that it puts in, its estimated effect, and the standard error.
        """
        effects: dict[str, list[tuple[str, float, float]]] = {name: [] for name in self.grown_in(texts)}
        estimates = self._estimates()
        for number in sorted(self.changes_in(texts)):
            change = self._changes[number]
            if change.component in effects:
                effects[change.component].append((change.part, *estimates[number]))
        return {name: rows for name, rows in effects.items() if len(rows) >= least}

    def grown_in(self, texts: Texts) -> list[str]:
        """Name the components whose text has grown: it joins what several children added who may not have seen each
        other's, or was made of such a text by edits."""
        return [name for name, text in texts.items() if hash_of({name: text}) in self._grown]

    def mark_grown(self, texts: Texts, names: Iterable[str]) -> None:
        """Take note that these components of a candidate have grown."""
        self._grown.update(hash_of({name: texts[name]}) for name in names)

    def _joined(self, chosen: Iterable[int]) -> list[str]:
        """Name the components in which several children have changes, or one in a text that has grown."""
        steps: dict[str, set[int]] = {name: {-1} for name in self.grown_in(self._weave.base)}
        for number in chosen:
            steps.setdefault(self._changes[number].component, set()).add(self._steps[number])
        return [name for name, made in steps.items() if len(made) > 1]

    def mark_written_anew(self, texts: Texts) -> None:
        """Take note that the reflection LM is asked to write these texts anew."""
        self._written_anew.add(hash_of(texts))

    def is_written_anew(self, texts: Texts) -> bool:
        """Whether the reflection LM was asked to write these texts anew, whatever came of it."""
        return hash_of(texts) in self._written_anew

    def mark_validating(self, step: int, head: Head) -> None:
        """Compare later heads with this one, which a step begins to validate."""
        self._tried[step] = head.changes

    def set_parent(self, index: int) -> None:
        """Name the best validated head, at ``index`` in gepa's pool."""
        self.parent = index

    def cancel_validation(self, step: int) -> bool:
        """Compare later heads with the last of the others: the head of a step was not validated after all.

        Returns:
            False where the step has no head.
        """
        return self._tried.pop(step, None) is not None

    def stand_on(self, candidate: Texts, index: int) -> None:
        """Put changes on another candidate from now on.

        Changes of components that it has written anew are gone; their last estimates are kept for the record.
        """
        records, prior = self._present(), self._effects.prior
        kept = self._weave.stand_on(candidate)
        self._former += [record for number, record in enumerate(records) if number not in kept]
        self._begin(self._weave, [self._steps[number] for number in kept])
        self._effects = replace(self._effects, prior=prior)  # children are as good as they were
        self.parent = index
        self._publish()

    def kept(self) -> dict[str, Any]:
        """Return, as JSON, what :meth:`restore` needs beside rollouts, and the estimates for people."""
        return {
            **self._weave.kept(),
            "parent": self.parent,
            "steps": self._steps,
            "children": list(self._children),
            "compositions": {name: sorted(changes) for name, changes in self._compositions.items()},
            "grown": sorted(self._grown),
            "written_anew": sorted(self._written_anew),
            "tried": [[step, sorted(changes)] for step, changes in self._tried.items()],
            "effects": [[record.effect, record.error] for record in self._present()],
            "former": [asdict(record) for record in self._former],
        }

    def restore(self, kept: Mapping[str, Any], rollouts: Iterable[tuple[str, str, str, float]]) -> None:
        """Put the changes, and the evidence on them, back where an interrupted run had them.

        Args:
            kept: see :meth:`kept`.
            rollouts: what :meth:`record_score` was told then.
        """
        self._begin(Weave.restored(kept), list(kept["steps"]))
        self.parent = kept["parent"]
        self._children.extend((step, is_whole) for step, is_whole in kept["children"])
        self._former = [ChangeRecord(**record) for record in kept["former"]]
        self._grown.update(kept["grown"])
        self._written_anew.update(kept["written_anew"])
        self._tried = {step: frozenset(changes) for step, changes in kept["tried"]}
        self._compositions.update({name: frozenset(changes) for name, changes in kept["compositions"].items()})
        for rollout in rollouts:
            self.record_score(*rollout)
        self._publish()

    def records(self) -> list[ChangeRecord]:
        """List every change that there has been, with its last estimate; the present ones last."""
        return [*self._former, *self._present()]

    def _present(self) -> list[ChangeRecord]:
        rows = zip(self._steps, self._changes, self._estimates(), strict=True)
        return [ChangeRecord(step, one.component, one.part, one.replaces, *estimate) for step, one, estimate in rows]

    def changes_in(self, candidate: Texts) -> frozenset[int]:
        """The changes of which a candidate is composed; empty where it is not."""
        return self._compositions.get(hash_of(candidate), frozenset())

    def is_made_of_changes(self, candidate: Texts) -> bool:
        """Whether a candidate is the base with changes in it."""
        return hash_of(candidate) in self._compositions

    def _compose(self, chosen: frozenset[int]) -> Texts:
        candidate = self._weave.compose(chosen)
        self._record_composition(candidate, chosen)
        return candidate

    def _record_composition(self, candidate: Texts, chosen: frozenset[int]) -> None:
        """Take note of the changes of which a candidate is composed."""
        self._compositions.setdefault(hash_of(candidate), chosen)
        self.mark_grown(candidate, self._joined(chosen))

    def _best(self) -> list[int]:
        """The changes that are expected to help, the best first."""
        helpful = [(-mean, number) for number, (mean, _) in enumerate(self._estimates()) if mean > 0]
        return self._without_rivals([number for _, number in sorted(helpful)])

    def _without_rivals(self, numbers: Iterable[int]) -> list[int]:
        """Keep the first of changes that claim the same, of which a text may have one."""
        kept, claimed = list[int](), set[str]()
        for number in numbers:
            if claimed.isdisjoint(self._changes[number].claims):
                kept.append(number)
                claimed |= self._changes[number].claims
        return kept

    def _that_fit(self, chosen: Iterable[int]) -> frozenset[int]:
        """Keep changes that make sense together, in the given order, as many as the length limits have room for."""
        kept, limits = self._supported(self._without_rivals(chosen)), (self._most_characters, self._most_each)
        while kept and is_too_long(self._weave.compose(kept), *limits, self._weave.base):
            kept = self._supported(kept[:-1])
        return frozenset(kept)

    def _supported(self, numbers: list[int]) -> list[int]:
        """Keep the changes all of whose needs are among them."""
        kept = [number for number in numbers if set(self._changes[number].needs) <= set(numbers)]
        return kept if len(kept) == len(numbers) else self._supported(kept)

    def _estimates(self) -> list[tuple[float, float]]:
        """Expected effects and their standard errors; of changes that are newer than the estimate, the prior's."""
        effects = self._effects
        known = zip(map(float, effects.mean), map(float, effects.error), strict=True)
        return [*known, *[effects.prior] * (len(self._changes) - len(effects.mean))]

    def _refit(self) -> None:
        """Estimate the effects anew once enough evidence has come in."""
        if self._changes and len(self._evidence) - self._fitted >= 12 + len(self._evidence) // 50:
            self._fitted = len(self._evidence)
            self._effects = self._evidence.effects(len(self._changes), self.scale)
            self._publish()
