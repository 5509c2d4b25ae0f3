"""Cases of the `sentence:` kinds and of the ratios of sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.benchmarks.ifbench.building import Case, different, filler


def _sentences(sizes: list[int], draw: Any) -> str:
    return " ".join(" ".join(filler(draw, size)) + draw(st.sampled_from([".", "!", "?"])) for size in sizes)


def alliteration_increment(draw: Any) -> Case:
    lengths = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4, unique=True))
    # A run of 1 is no alliteration; two runs in one sentence add up.
    good = [f"Some {'round ' * length}blue {'red ' * length}thing." for length in sorted(lengths)]
    return Case({}, " ".join(good), draw(st.sampled_from([" ".join(good[::-1]), f"{good[0]} {good[0]}"])))


def increment(draw: Any) -> Case:
    step, first, count = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(2, 4))
    sizes = [first + step * number for number in range(count)]
    bad = draw(st.sampled_from([[*sizes[:-1], sizes[-1] + 1], sizes[::-1]]))
    good = draw(st.sampled_from([sizes, sizes[:1]]))
    return Case({"small_n": float(step)}, _sentences(good, draw), _sentences(bad, draw))


def keyword(draw: Any) -> Case:
    place = draw(st.integers(1, 5))
    before, after = _sentences([2] * (place - 1), draw), _sentences([1, 2], draw)
    bad = draw(st.sampled_from([f"{before} {after} Zesty.", f"{before} {after} A b. zest", f"{before} xx yy. Zest."]))
    return Case({"N": float(place), "word": "zest"}, f"{before} A Zest, b. {after}", bad)


def _marked(marks: str, draw: Any) -> str:
    return " ".join(" ".join(filler(draw)).capitalize() + mark for mark in marks)


def sentence_balance(draw: Any) -> Case:
    times = draw(st.integers(1, 3))
    good = "".join(draw(st.permutations(".!?" * times)))
    quoted = f'{_marked(good, draw)} "And this."'
    return Case({}, quoted, _marked(good + draw(st.sampled_from([".", "!", "?"])), draw))


def sentence_type(draw: Any) -> Case:
    times = draw(st.integers(1, 3))
    good = "".join(draw(st.permutations("..?" * times)))
    bad = draw(st.sampled_from([good + ".", good + "?", "..", "!!?"]))
    return Case({}, _marked(draw(st.sampled_from([good, good + "!", "!!"])), draw), _marked(bad, draw))


def sentence_words(draw: Any) -> Case:
    size = draw(st.integers(1, 3))
    used = [word.ljust(6, "z") for word in different(draw, 3 * size + size)]
    parts = [" ".join(used[number * size : (number + 1) * size]) + mark for number, mark in enumerate(".!?.")]
    bad = draw(st.sampled_from([parts, parts[:2], [*parts[:2], f"x{parts[2]}"]]))
    return Case({}, " ".join(parts[:3]), " ".join(bad))


CASES: dict[str, Callable[[Any], Case]] = {
    **{f"sentence:{build.__name__}": build for build in (alliteration_increment, increment, keyword)},
    **{f"ratio:{build.__name__}": build for build in (sentence_balance, sentence_type, sentence_words)},
}
