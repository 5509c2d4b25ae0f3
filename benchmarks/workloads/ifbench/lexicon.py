"""Word lists, tables and rules in place of the models and data that the official evaluator downloads."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from typing import Any


def word_set(listed: str) -> frozenset[str]:
    """The words of a list with spaces between them."""
    return frozenset(listed.split())


CONJUNCTIONS = word_set("for and nor but or yet so")

PERSON_NAMES = word_set(
    """Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin
    Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria
    Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella
    Jonathan"""
)

PRONOUNS = word_set(
    """i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers
    herself it its itself they them their theirs themselves"""
)

# English stop words as \w+ finds them: the pieces of contractions are apart.
STOP_WORDS = word_set(
    """a about above after again against ain all am an and any are aren as at be because been before being below between
    both but by can couldn d did didn do does doesn doing don down during each few for from further had hadn has hasn
    have haven having he her here hers herself him himself his how i if in into is isn it its itself just ll m ma me
    mightn more most mustn my myself needn no nor not now o of off on once only or other our ours ourselves out over own
    re s same shan she should shouldn so some such t than that the their theirs them themselves then there these they
    this those through to too under until up ve very was wasn we were weren what when where which while who whom why
    will with won wouldn y you your yours yourself yourselves"""
)

ABBREVIATIONS = word_set(
    """adm ala ariz aug ave bros calif capt co col colo conn corp cos ct dec dr feb fla fri ft ga gen gov ill inc jan jr
    kan lt ltd maj mass md messrs mg mich minn mo mr mrs ms nev nov oct okla ore pa ph.d prof rep reps rev sen sep sept
    sgt sr st tenn tues va vs vt wash wed wis yr a.d a.m b.c d.c i.b.m l.a m.b.a n.c n.h n.j n.m n.y p.m r.i s.c u.k u.n
    u.s u.s.a u.s.s.r"""
)

# What Unicode counts as an emoji by itself (emoji-test.txt, version 17), in hexadecimal.
_EMOJI_RANGES = """
    A9 AE 203C 2049 2122 2139 2194-2199 21A9-21AA 231A-231B 2328 23CF 23E9-23F3 23F8-23FA 24C2 25AA-25AB 25B6 25C0
    25FB-25FE 2600-2604 260E 2611 2614-2615 2618 261D 2620 2622-2623 2626 262A 262E-262F 2638-263A 2640 2642
    2648-2653 265F-2660 2663 2665-2666 2668 267B 267E-267F 2692-2697 2699 269B-269C 26A0-26A1 26A7 26AA-26AB
    26B0-26B1 26BD-26BE 26C4-26C5 26C8 26CE-26CF 26D1 26D3-26D4 26E9-26EA 26F0-26F5 26F7-26FA 26FD 2702 2705
    2708-270D 270F 2712 2714 2716 271D 2721 2728 2733-2734 2744 2747 274C 274E 2753-2755 2757 2763-2764 2795-2797
    27A1 27B0 27BF 2934-2935 2B05-2B07 2B1B-2B1C 2B50 2B55 3030 303D 3297 3299 1F004 1F0CF 1F170-1F171 1F17E-1F17F
    1F18E 1F191-1F19A 1F201-1F202 1F21A 1F22F 1F232-1F23A 1F250-1F251 1F300-1F321 1F324-1F393 1F396-1F397
    1F399-1F39B 1F39E-1F3F0 1F3F3-1F3F5 1F3F7-1F4FD 1F4FF-1F53D 1F549-1F54E 1F550-1F567 1F56F-1F570 1F573-1F57A
    1F587 1F58A-1F58D 1F590 1F595-1F596 1F5A4-1F5A5 1F5A8 1F5B1-1F5B2 1F5BC 1F5C2-1F5C4 1F5D1-1F5D3 1F5DC-1F5DE
    1F5E1 1F5E3 1F5E8 1F5EF 1F5F3 1F5FA-1F64F 1F680-1F6C5 1F6CB-1F6D2 1F6D5-1F6D9 1F6DC-1F6E5 1F6E9 1F6EB-1F6EC
    1F6F0 1F6F3-1F6FC 1F7E0-1F7EB 1F7F0 1F90C-1F93A 1F93C-1F945 1F947-1F9FF 1FA70-1FA7C 1FA80-1FAC6 1FAC8
    1FACC-1FADD 1FADF-1FAEB 1FAEF-1FAFA
"""
EMOJIS = frozenset(
    chr(code)
    for first, _, last in (part.partition("-") for part in _EMOJI_RANGES.split())
    for code in range(int(first, 16), int(last or first, 16) + 1)
)

_VERBS = word_set(
    """accept achieve acknowledge act adapt add address adjust admit adopt advance advise agree aim align allow alter
    analyze analyse announce answer apply approach appreciate argue arise arrange arrive ask assemble assert assess
    assign assume attach attempt avoid awaken balance base bathe be become beg begin behold believe bend blend borrow
    break breathe bring build burn buy calculate call capture care carry cast catch celebrate change check choose
    circle claim classify clean clear climb close code collect combine come commence compare complete compose compute
    conceive concern conclude conduct confirm connect consider construct consume contain continue contrast convert
    convey cook cover craft crawl create cross cry cultivate cut dance dare decide declare deduce define deliver delve
    demand demonstrate denote depend derive describe design desire destroy detail determine develop discover discuss
    display dive divide draft draw dream drink drive drop earn eat edit eliminate embark embrace emerge employ empower
    enable encounter encourage end engage enhance enjoy ensure enter envision establish estimate evaluate examine exist
    expand expect experience explain explore express extend extract face fall feel fetch fight fill filter find finish
    fix fly focus follow forge forget form formulate foster gain gather gaze generate get give go grant grasp greet
    grow guess guide hail handle happen harness have hear help highlight hold hope identify ignite illustrate imagine
    implement imply import improve include incorporate increase indicate infer insert inspect install integrate
    introduce invent investigate invite involve join journey judge jump keep kill know label laugh launch lead learn
    leave lend let leverage lie lift light list listen live load look lose love maintain make manage map mark master
    match maximize mean measure meet mention minimize mix modify mount move multiply name navigate need note notice
    observe obtain occur offer open operate optimize organize outline overcome pay perform permit pick picture place
    plan play please point ponder practice prepare present preserve press prevent print proceed process produce
    promote propose protect prove provide pull pursue push put question quote raise reach read realize recall receive
    recite recognize recommend record recover reduce refer refine reflect reject relate release rely remain remember
    remove render repeat replace report represent request require research resolve respond rest restore return reveal
    review revise rewrite ride rise run save say scan schedule search seal secure see seek seem select sell send serve
    set shape share shift shine show simplify simulate sing sit sleep solve sort speak specify spend spread stand start
    state stay step stop store strengthen strike strive structure struggle study submit substitute succeed suffer
    suggest summarize supply support suppose surround survive sustain swim take talk teach tell test thank think thrive
    throw trace track train transform translate travel treat trust try turn type uncover understand undertake unite
    unleash unlock unveil update use utilize validate venture verify view visit visualize wait walk wander want watch
    wear weave weigh welcome wield win wish witness wonder work worry write yield"""
)
_OTHER_VERB_FORMS = word_set(
    """am is are was were been being do does did done has had began begun became bent bought broke broken brought built
    came caught chose chosen cut drawn drew driven drove ate eaten fallen fell felt found flew flown forgot gave given
    gone went got grew grown heard held kept knew known led left lost made meant met paid ran rose risen said sat sang
    saw seen sent shown slept sold sought spent spoke spoken stood struck swam taken took taught thought threw thrown
    told understood won wore woven wrote written"""
)
_NO_VERBS = word_set(
    """during ceiling evening morning string spring thing anything everything nothing something hundred indeed sacred
    kindred"""
)
_ENDINGS = (("ies", "y"), ("ied", "y"), ("es", ""), ("s", ""), ("ed", ""), ("ed", "e"), ("ing", ""), ("ing", "e"))
_PARTICIPLE = re.compile(r"\w*[aeiouy]\w*(?:ing|ed)")


def may_be_verb(word: str) -> bool:
    """Whether it may be an English verb in one of its forms, modal verbs aside; it may be a noun as well ("plan").

    Example:
        >>> [may_be_verb(word) for word in ("Imagine", "whirring", "went", "bird", "must")]
        [True, True, True, False, False]
    """
    lower = word.casefold()
    known = lower in _VERBS or lower in _OTHER_VERB_FORMS or any(stem in _VERBS for stem in _stems(lower))
    return known or (lower not in _NO_VERBS and len(lower) > 4 and _PARTICIPLE.fullmatch(lower) is not None)


def _stems(word: str) -> list[str]:
    stems = [word.removesuffix(ending) + letter for ending, letter in _ENDINGS if word.endswith(ending)]
    return stems + [stem[:-1] for stem in stems if len(stem) > 2 and stem[-1] == stem[-2]]


_SYLLABLES = {
    "area": 3, "being": 2, "business": 2, "create": 2, "created": 3, "creates": 2, "diet": 2, "doing": 2, "every": 2,
    "evening": 2, "going": 2, "idea": 3, "ideas": 3, "lion": 2, "naive": 2, "people": 2, "poem": 2, "poet": 2,
    "quiet": 2, "react": 2, "really": 2, "science": 2, "seeing": 2, "something": 2, "sometimes": 2, "someone": 2,
    "therefore": 2, "trial": 2, "video": 3, "violet": 3, "were": 1, "whose": 1, "violin": 3,
}  # fmt: skip


@functools.cache
def _syllapy() -> Any:
    """The package by which the official evaluator counts; `None` if it is not installed."""
    return importlib.import_module("syllapy") if importlib.util.find_spec("syllapy") else None


def syllables(word: str) -> int:
    """The number of syllables by syllapy where it is installed (extra `benchmarks`), else by our own rule.

    The rule: groups of vowels without a silent e, at least 1, and a short list of exceptions; 0 for what has a digit.

    Example:
        >>> [syllables(word) for word in ("strength", "table", "hoped", "banana", "3rd")]
        [1, 2, 1, 3, 0]
    """
    counted = _syllapy()
    return counted.count(word) if counted else _estimated_syllables(word)


def _estimated_syllables(word: str) -> int:
    letters = re.sub(r"[^a-z]", "", word.casefold())
    if not letters or any(character.isdigit() for character in word):
        return 0
    if letters in _SYLLABLES:
        return _SYLLABLES[letters]
    groups = len(re.findall(r"[aeiouy]+", letters))
    silent = re.search(r"[^aeiouyl]e$|[aeiouy]le$|[^aeiouytd]ed$|[^aeiouyscxzgh]es$", letters)
    return max(1, groups - bool(silent))
