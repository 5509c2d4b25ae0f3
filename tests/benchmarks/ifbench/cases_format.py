"""Cases of the `format:` kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.benchmarks.ifbench.building import Case, filler

EMOJIS = st.sampled_from(["😀", "🎉", "❤️", "👩‍🚀", "©"])


def _text(draw: Any) -> str:
    return " ".join(filler(draw))


def emoji(draw: Any) -> Case:
    marks = draw(st.lists(st.sampled_from([" {}.", " {}!", " **{}**?"]), min_size=1, max_size=4))
    good = " ".join(_text(draw) + mark.format(draw(EMOJIS)) for mark in marks)
    # An emoji may begin the next sentence, unless there is none.
    good = draw(st.sampled_from([good, f"Well. {draw(EMOJIS)} {good}"]))
    bad = draw(st.sampled_from([f"{good} More.", f"Well. {good}", f"{good} More", "Never!", "Flag 🇫🇷."]))
    return Case({}, good, bad)


def line_indent(draw: Any) -> Case:
    steps = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    widths = [sum(steps[:number]) for number in range(len(steps) + 1)]
    good = [" " * width + _text(draw) for width in widths]
    bad = draw(st.sampled_from(["\n".join([*good, good[-1]]), "\n".join(good[::-1]), "\n\n\n".join(good)]))
    return Case({}, draw(st.sampled_from(["\n", "\n\n"])).join(good), bad)


def item_list(draw: Any) -> Case:
    sep = draw(st.sampled_from(["!?!?", "SEPARATOR", "-"]))
    items = [f"{sep} {_text(draw)}" for _ in range(draw(st.integers(2, 5)))]
    bad = draw(st.sampled_from([items[0], _text(draw), "* a\n* b", "1. a\n2. b"]))
    return Case({"sep": sep}, draw(st.sampled_from(["\n", " "])).join(["Here:", *items]), bad)


def newline(draw: Any) -> Case:
    words = filler(draw)
    return Case({}, "\n".join([*words, "**", ""]), "\n".join([*words, "two words"]))


def no_bullets_bullets(draw: Any) -> Case:
    bullets = "\n".join(f"* {_text(draw)}" for _ in range(draw(st.integers(2, 4))))
    before = draw(st.sampled_from([". ", ".\n", "! "])).join([_text(draw), f"{_text(draw)}."])
    bad = [f"{before}\n* one", f"One.\n{bullets}", f"{bullets}\n{before}", before, f"{before}\n\n\n{bullets}"]
    bad += [f"{before}\n\n{bullets}\nMore.", f"{before}\n* one\n\n* two", f"One.\n\n{before}\n{bullets}"]
    return Case({}, draw(st.sampled_from(["\n", "\n\n"])).join([before, bullets]), draw(st.sampled_from(bad)))


def no_whitespace(draw: Any) -> Case:
    good = "".join(filler(draw)) + ",end."
    return Case({}, good, draw(st.sampled_from([f"{good} {good}", f"{good}\n", f"\t{good}", f"a\u00a0{good}"])))


def options(draw: Any) -> Case:
    given = draw(st.sampled_from(["yes/no/maybe", "I know or I don't know", "a), b), c), d)"]))
    good = {"yes/no/maybe": ["Yes", '"no".', "- maybe"], "I know or I don't know": ["I KNOW.", "I don't know"]}
    bad = ["I know, yes", "b) and c)", "perhaps", "Yes, because", "e)", "a", "B)", "I don’t know", "yes\n"]
    chosen = draw(st.sampled_from(good.get(given, ["a)", "d)"])))
    return Case({"options": given}, chosen, draw(st.sampled_from(bad)))


def output_template(draw: Any) -> Case:
    parts = [f"My Answer: {_text(draw)}", f"My Conclusion: {_text(draw)}", f"Future Outlook: {_text(draw)}"]
    bad = draw(
        st.sampled_from([parts[:2], parts[1:], [part.upper() for part in parts], [*parts[:2], "Future Outlook"]])
    )
    return Case({}, draw(st.sampled_from(["\n", " "])).join(["Sure!", *draw(st.permutations(parts))]), "\n".join(bad))


def parentheses(draw: Any) -> Case:
    def nested(depth: int) -> str:
        text = _text(draw)
        for _ in range(depth):
            one, two = draw(st.sampled_from(["()", "[]", "{}"]))
            text = f"{_text(draw)} {one}{text}{two}"
        return text

    bad = draw(st.sampled_from([nested(4), "((((((((", f"{nested(4)} {nested(2)}", "([([([)])])]", "()" * 9]))
    good = nested(draw(st.integers(5, 7)))
    return Case({}, draw(st.sampled_from([good, f"(((({good}", f"1) {good}"])), bad)


def quotes(draw: Any) -> Case:
    outer, inner = draw(st.sampled_from(["\"'", "'\""]))
    two = f"{inner}{_text(draw)} {outer}it is {_text(draw)}{outer}{inner}"
    good = f"I said, {outer}{_text(draw)} {two} now.{outer}"
    curly = "“one ‘two “three” two’ one”"
    return Case({}, good, draw(st.sampled_from([two, f"{two} and {two}", '"a" \'b\' "c"', curly, "don't it's"])))


def quote_unquote(draw: Any) -> Case:
    parts = [f'"{_text(draw)}" means {_text(draw)}.' for _ in range(draw(st.integers(1, 3)))]
    good = " ".join(parts)
    good = draw(st.sampled_from([good, "without quotes", f"{good} “curly”.", f"{good} Write '\"' twice: '\"'"]))
    return Case({}, good, draw(st.sampled_from([f'{good} "no"', f'"no" "{good}', f'{good} "no". 1)'])))


def sub_bullets(draw: Any) -> Case:
    blocks = [f"* {_text(draw)}\n  - {_text(draw)}" for _ in range(draw(st.integers(1, 4)))]
    good = "\n".join(blocks)
    good = draw(st.sampled_from([good, f"Bullets:\n{good}", "- only\n- these", "none"]))
    return Case({}, good, draw(st.sampled_from([f"{good}\n* alone", f"* alone\n* x\n{good}", f"**bold**\n{good}"])))


def thesis(draw: Any) -> Case:
    mark = draw(st.sampled_from(["i", "em"]))
    body = f"<{mark}>{_text(draw)}.</{mark}> {_text(draw)}."
    body = draw(st.sampled_from([body, f"<p>{body}</p>", f'<div class="x">\n<p>{body}</p>\n</div>']))
    heading = draw(st.sampled_from(["", "## One\n", "<h2>One</h2>\n", "**One**\n\n"]))
    good = "\n\n".join(f"{heading}{body}" for _ in range(draw(st.integers(1, 3))))
    bad = [
        f"*{_text(draw)}* text",
        "<b>bold</b> text",
        "<i> </i> text",
        "<i>italic</i>",
        "<i>open text",
        "<p>plain</p>",
    ]
    return Case({}, good, draw(st.sampled_from(bad)))


def title_case(draw: Any) -> Case:
    titles = " ".join(word.capitalize() for word in filler(draw))
    good = f"The {titles} Of The 3 Kings And Queen's LLMs (With An IPhone And iPads)."
    return Case({}, good, draw(st.sampled_from([f"{good} lower", f"the {titles}", f"{titles} a", f"{titles} Don't"])))


CASES: dict[str, Callable[[Any], Case]] = {
    **{
        f"format:{build.__name__}": build
        for build in (
            emoji, line_indent, newline, no_bullets_bullets, no_whitespace, options, output_template, parentheses,
            quotes, quote_unquote, thesis, title_case,
        )
    },
    "format:list": item_list,
    "format:sub-bullets": sub_bullets,
}  # fmt: skip
