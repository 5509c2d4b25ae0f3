"""Credit assignment: what each patch to the prompts is worth, from all rollouts at once.

    score(candidate, example) = level(example) + sum of effect(patch) over the patches in the candidate + noise

This is a linear mixed model. Its evidence is every rollout of a candidate that is made of patches: the ones that
reflection reads, screens and validations. Levels of examples have a prior around a common mean, so that an easy example
is not taken for a good patch; they are nuisance parameters, and are eliminated (absorbed) before the effects are solved
for. The noise is the standard deviation of scores within examples, pooled. The effects have a normal prior, and the
estimates are its posterior means: best linear unbiased predictions (Henderson 1975), shrunk as ridge regression is. The
prior's mean and spread are themselves estimated from the same rollouts, by the largest marginal likelihood (empirical
Bayes): where patches mostly help, new ones are trusted at once; where many harm, few are tried at a time. The mean
begins slightly above 0, since no patch would join the head untested otherwise. Steps start from variants, which have
the patches whose effects, drawn from their posterior, are above 0 (Thompson sampling): so the rollouts that reflection
needs anyway are a screening design (Plackett and Burman 1946). The head has every patch whose posterior mean is above
0, the best first, as far as they go together. Effects are taken to add up; where they do not, heads bring nothing and
are doubted.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspy_flashevolve.engine.staleness import Texts
from dspy_flashevolve.engine.store import hash_of
from dspy_flashevolve.gepa.edits import Edit, Patches
from dspy_flashevolve.observe.statistics import ChangeRecord

Array = NDArray[np.float64]

PRIOR_MEAN, PRIOR_SD = 1 / 30, 1 / 10
"""Prior mean and standard deviation of a patch's effect, in units of the noise (the standard deviation of a rollout's
score on one example): .01 and .03 for scores of 0 and 1. With a mean of 0 no patch would join the head untested. Not
tuned."""
PRIOR_WEIGHT = 6.0
"""Number of patches that the prior mean counts as where it is estimated anew, so that the first few patches do not
decide whether all later ones are trusted. Not tuned."""
SPREADS = (1 / 6, 1 / 3, 2 / 3, 1.0, 5 / 3, 8 / 3, 4.0)
"""Standard deviations of effects among which the likeliest is chosen (empirical Bayes), in units of `PRIOR_SD`: from
patches that hardly matter to a few that decide everything. Not tuned."""
EXAMPLE_SD = 0.25
"""Prior standard deviation of examples' mean scores, as a share of the range of scores: about that of a uniform
distribution (.29), so that an example with few rollouts is drawn to the common mean, and one with many is not. Not
tuned."""
FIRST_NOISE = 0.3
"""Noise, as a share of the range of scores, until there are rollouts to measure it: that of a score of 0 or 1 which is
right nine times in ten. Not tuned."""
SCORE_BOUND = 1e6
"""Scores are bounded by this times their range, so that nonsense does not overflow. Not tuned."""
LAST_CHILDREN = 8
"""Number of children by which a reflection LM is said to add to its parents or to rewrite them: enough that one odd
reply does not turn the search, and few enough to see that later children keep more of a prompt than the first ones.
Not tuned."""


@dataclass(frozen=True, slots=True)
class Effects:
    """Estimates for patches, in their order.

    Args:
        mean: expected effects on the score.
        error: their standard errors.
        prior: mean and standard deviation of the effects of patches of which nothing is known.
    """

    mean: Array
    error: Array
    prior: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Head:
    """The base with all patches that are expected to help, by all evidence so far.

    Args:
        candidate: its texts.
        patches: numbers of the patches in it.
        gain: what it is expected to bring over the last validated head, in score.
    """

    candidate: Texts
    patches: frozenset[int]
    gain: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What admission reads of the patches while the pool's writer works on them; never changed, only replaced.

    Args:
        joins: whether children come as edits; False where more of the last ones are whole texts, None before the first.
        is_grown: the head joins what several children added to one text, as far as the last estimate tells.
    """

    joins: bool | None = None
    is_grown: bool = False


class Evidence:
    """Scores of compositions, sets of patches, on examples. Any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: list[tuple[int, int, float]] = []
        self._examples: dict[Hashable, int] = {}
        self._compositions: dict[frozenset[int], int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, example: Hashable, composition: frozenset[int], score: float) -> None:
        """Take in one rollout's score, unless it is no finite number."""
        if not math.isfinite(score):
            return
        with self._lock:
            row = self._examples.setdefault(example, len(self._examples))
            column = self._compositions.setdefault(composition, len(self._compositions))
            self._rows.append((row, column, score))

    def effects(self, patches: Sequence[int], scale: float) -> Effects:
        """Estimate the effects of patches with these numbers; ``scale`` is the range of scores."""
        with self._lock:
            table = np.array(self._rows)
            examples, compositions = len(self._examples), list(self._compositions)
        rows, columns = table[:, 0].astype(np.intp), table[:, 1].astype(np.intp)
        scores = np.clip(table[:, 2], -SCORE_BOUND * scale, SCORE_BOUND * scale)
        count = len(compositions)
        design = np.array([[number in composition for number in patches] for composition in compositions], dtype=float)
        of_example = np.bincount(rows, minlength=examples).astype(float)
        totals = np.bincount(rows, scores, minlength=examples).astype(np.float64)
        noise = _noise(rows, scores, of_example, totals, scale)
        # The levels of examples, and their common mean, are absorbed (Schur complement of the mixed model equations).
        weight = 1 / (of_example + (noise / (EXAMPLE_SD * scale)) ** 2)
        order, first = np.argsort(rows, kind="stable"), np.searchsorted(np.sort(rows), np.arange(examples))
        per_example = np.add.reduceat(design[columns[order]], first)
        information = (design.T * np.bincount(columns, minlength=count)) @ design
        information -= (per_example.T * weight) @ per_example
        pull = design.T @ np.bincount(columns, scores, minlength=count) - per_example.T @ (weight * totals)
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
    mask = values > 1e-6 * max(noise**-2, float(values.max(initial=0.0)))
    ones = (vectors.T @ np.ones(size))[mask]
    variance = 1 / values[mask]
    estimate = (vectors.T @ pull)[mask] * variance
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
    """Estimates what each patch is worth, and composes candidates of patches: variants to learn from, and the head.

    Everything but :meth:`record_score` runs in the pool's writer; :attr:`outlook` is what others may read.

    Args:
        seed: component -> text, on which patches are put.
        scale: the range of scores.
        most_characters: of a candidate's texts together; None for no limit.
        most_each: of each text that is joined; None for no limit.
    """

    def __init__(
        self, seed: Texts, scale: float, most_characters: int | None = None, most_each: int | None = None
    ) -> None:
        self._limits = most_characters, most_each
        self.scale = scale
        self._former: list[ChangeRecord] = []
        """Patches of former bases, with their last estimates."""
        self.parent = 0
        """The pool's index of the last validated head."""
        self._children = deque[tuple[int, bool]](maxlen=LAST_CHILDREN)
        """Step and whether its child was written as a whole text, of the last children."""
        self.outlook = Outlook()
        self._grown = set[str]()
        """Texts, as hashes, each with its component's name, that have grown; see :meth:`grown_in`."""
        noise = FIRST_NOISE * scale
        self._prior = PRIOR_MEAN * noise, PRIOR_SD * noise
        self._patches = Patches(seed)
        self._begin()

    def _begin(self) -> None:
        """Begin anew on the present base, without any evidence; children are as good as they were."""
        self._estimates: dict[int, tuple[float, float]] = {}
        """Number of a patch -> its expected effect, the standard error; those of newer ones are the prior's."""
        self._fitted = 0
        # Rollouts end on the run's loop: what they read is replaced as a whole, so that it never mixes two bases.
        self._evidence = dict[str, frozenset[int]]({hash_of(self._patches.base): frozenset()}), Evidence()
        """The patches in each candidate, a hash of texts, and its scores."""

    def record_score(self, candidate: str, split: str, example: Hashable, score: float) -> None:
        """Take the score of a rollout as evidence, where the candidate, a hash of texts, is made of patches."""
        compositions, evidence = self._evidence
        composition = compositions.get(candidate)
        if composition is not None:
            evidence.add((split, example), composition, score)

    def record_children(self, step: int, are_whole: Iterable[bool]) -> None:
        """Count once which of a step's children were written as whole texts, whatever becomes of them."""
        if all(number != step for number, _ in self._children):
            self._children.extend((step, is_whole) for is_whole in are_whole)
            self._publish()

    def take(
        self,
        step: int,
        parent: Texts,
        child: Texts,
        edits: Mapping[str, Iterable[Edit]],
        split: str,
        scores: Mapping[str, float],
    ) -> bool:
        """Make patches of a child's edits; False where its parent is not made of patches, and it stands for itself.

        Args:
            step: that made it.
            parent, child: their texts.
            edits: component -> edits of the parent that make the child.
            split, scores: what the child had on its screen.
        """
        self.mark_grown(child, self.grown_in(parent))
        before = self.composition_of(parent)
        composition = None if before is None else self._patches.take(step, before, edits)
        if composition is None:
            return False
        if self.composition_of(child) is None:
            self._record(child, composition)
            for example, score in scores.items():
                self.record_score(hash_of(child), split, example, score)
        self._publish()
        return True

    def variant(self, rng: random.Random) -> Texts:
        """Compose a candidate that tests patches: those whose effect, drawn from its posterior, is above 0.

        This is Thompson sampling (1933): what surely helps is in nearly all variants, what surely harms in hardly any,
        and what nothing is known of in about half of them.
        """
        self._refit()
        chosen = [number for number, (mean, error) in self._estimated().items() if rng.gauss(mean, error) > 0]
        rng.shuffle(chosen)
        return self._compose(self._patches.that_fit(chosen, *self._limits))

    def head(self, over: frozenset[int] = frozenset()) -> Head:
        """Compose the base with all patches that are expected to help; its gain is what it has ``over`` others."""
        self._refit()
        estimated, chosen = self._estimated(), frozenset(self._patches.that_fit(self._helpful(), *self._limits))
        gain = sum(estimated[one][0] for one in chosen - over) - sum(estimated[one][0] for one in over - chosen)
        return Head(self._compose(chosen), chosen, gain)

    def composition_of(self, candidate: Texts) -> frozenset[int] | None:
        """Numbers of the patches in a candidate; None where it is not the base with patches in it."""
        return self._evidence[0].get(hash_of(candidate))

    def grown_in(self, texts: Texts) -> list[str]:
        """Name the components whose text has grown: it joins what several children added who may not have seen each
        other's, or was made of such a text by edits."""
        return [name for name, text in texts.items() if hash_of({name: text}) in self._grown]

    def mark_grown(self, texts: Texts, names: Iterable[str]) -> None:
        """Take note that these components of a candidate have grown."""
        self._grown.update(hash_of({name: texts[name]}) for name in names)

    def effects_in_grown(self, texts: Texts) -> dict[str, list[tuple[str, float, float]]]:
        """Say of each component that has grown what is known of its patches: text, estimated effect, standard error."""
        effects: dict[str, list[tuple[str, float, float]]] = {name: [] for name in self.grown_in(texts)}
        estimated = self._estimated()
        for number in sorted(self.composition_of(texts) or ()):
            patch = self._patches.by_number[number]
            if patch.component in effects:
                effects[patch.component].append((patch.text, *estimated[number]))
        return effects

    def set_parent(self, index: int) -> None:
        """Name the best validated head, at ``index`` in gepa's pool."""
        self.parent = index

    def stand_on(self, candidate: Texts, index: int) -> None:
        """Put patches on another candidate from now on.

        Patches of components that it has written anew are gone; their last estimates are kept for the record.
        """
        records = dict(zip(self._patches.by_number, self._present(), strict=True))
        self._former += [records[patch.number] for patch in self._patches.rebase(candidate)]
        self._begin()
        self.parent = index
        self._publish()

    def records(self) -> list[ChangeRecord]:
        """List every patch that there has been, with its last estimate; the present ones last."""
        return [*self._former, *self._present()]

    def _present(self) -> list[ChangeRecord]:
        return [
            ChangeRecord(patch.step, patch.component, patch.text, self._patches.replaced(patch), *estimate)
            for patch, estimate in zip(self._patches.by_number.values(), self._estimated().values(), strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`restore` needs beside rollouts, and the estimates for people."""
        return {
            **self._patches.to_json(),
            "parent": self.parent,
            "children": list(self._children),
            "compositions": {name: sorted(numbers) for name, numbers in self._evidence[0].items()},
            "grown": sorted(self._grown),
            "records": [asdict(record) for record in self.records()],
        }

    def restore(self, saved: Mapping[str, Any], rollouts: Iterable[tuple[str, str, str, float]]) -> None:
        """Put the patches, and the evidence on them, back where an interrupted run had them.

        Args:
            saved: see :meth:`to_json`.
            rollouts: what :meth:`record_score` was told then.
        """
        self._patches = Patches.from_json(saved)
        self._begin()
        self.parent = saved["parent"]
        self._children.extend((step, is_whole) for step, is_whole in saved["children"])
        former = len(saved["records"]) - len(saved["patches"])
        self._former = [ChangeRecord(**record) for record in saved["records"][:former]]
        self._grown.update(saved["grown"])
        self._evidence[0].update({name: frozenset(numbers) for name, numbers in saved["compositions"].items()})
        for rollout in rollouts:
            self.record_score(*rollout)
        self._publish()

    def _compose(self, chosen: Iterable[int]) -> Texts:
        composition = frozenset(chosen)
        candidate = self._patches.render(composition)
        self._record(candidate, composition)
        return candidate

    def _record(self, candidate: Texts, composition: frozenset[int]) -> None:
        """Take note of the patches in a candidate."""
        self._evidence[0].setdefault(hash_of(candidate), composition)
        self.mark_grown(candidate, self._joined(composition))

    def _joined(self, composition: Iterable[int]) -> list[str]:
        """Name the components in which several children have patches, or one in a text that has grown."""
        steps: dict[str, set[int]] = {name: {-1} for name in self.grown_in(self._patches.base)}
        for number in composition:
            patch = self._patches.by_number[number]
            steps.setdefault(patch.component, set()).add(patch.step)
        return [name for name, origins in steps.items() if len(origins) > 1]

    def _helpful(self) -> list[int]:
        """The patches that are expected to help, the best first."""
        helpful = [(-mean, number) for number, (mean, _) in self._estimated().items() if mean > 0]
        return [number for _, number in sorted(helpful)]

    def _estimated(self) -> dict[int, tuple[float, float]]:
        return {number: self._estimates.get(number, self._prior) for number in self._patches.by_number}

    def _refit(self) -> None:
        """Estimate the effects anew once enough evidence has come in."""
        evidence, numbers = self._evidence[1], list(self._patches.by_number)
        if numbers and len(evidence) - self._fitted >= 12 + len(evidence) // 50:
            self._fitted = len(evidence)
            effects = evidence.effects(numbers, self.scale)
            pairs = zip(map(float, effects.mean), map(float, effects.error), strict=True)
            self._estimates, self._prior = dict(zip(numbers, pairs, strict=True)), effects.prior
            self._publish()

    def _publish(self) -> None:
        """Replace :attr:`outlook` by how the children and the head are now."""
        whole = [is_whole for _, is_whole in self._children]
        joins = 2 * sum(whole) <= len(whole) if whole else None
        self.outlook = Outlook(joins, bool(self._joined(self._patches.that_fit(self._helpful()))))
