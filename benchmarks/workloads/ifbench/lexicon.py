"""Our own short word lists and a syllable rule: no part-of-speech tagger and no download, so all are approximations."""

from __future__ import annotations

import re


def word_set(listed: str) -> frozenset[str]:
    """The words of a list with spaces between them."""
    return frozenset(listed.split())


COORDINATING_CONJUNCTIONS = word_set("for and nor but or yet so")

PERSON_NAMES = word_set(
    """Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin
    Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria
    Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella
    Jonathan"""
)

PRONOUNS = word_set(
    """i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers
    herself it its itself they them their theirs themselves themself this that these those who whom whose which what
    whoever whomever whichever whatever anybody anyone anything everybody everyone everything nobody none nothing
    somebody someone something another other others each either neither both all any few many most much one several
    some such"""
)

STOP_WORDS = word_set(
    """a about above after again against all am an and any are as at be because been before being below between both but
    by can could did do does doing don't down during each either few for from further had has have having he her here
    hers herself him himself his how i if in into is it its itself just may me might more most must my myself neither no
    nor not now of off on once only or other our ours ourselves out over own same shall she should so some such than
    that the their theirs them themselves then there these they this those through to too under until up upon very was
    we were what when where which while who whom whose why will with would you your yours yourself yourselves i'm i've
    i'll i'd you're you've you'll he's she's it's we're we've they're they've that's there's isn't aren't wasn't weren't
    doesn't didn't won't wouldn't can't couldn't shouldn't hasn't haven't"""
)

MINOR_WORDS = word_set(
    """a an the and but or nor for so yet as at by in of off on per to up via vs from into onto over with than if upon
    about after before between through under without within among against during"""
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
    """am is are was were been being isn't aren't wasn't weren't do does did done don't doesn't didn't has had can can't
    could couldn't may might must shall should shouldn't will won't would wouldn't began begun became bent bought broke
    broken brought built came caught chose chosen cut drawn drew driven drove ate eaten fallen fell felt found flew
    flown forgot gave given gone went got grew grown heard held kept knew known led left let's lost made meant met paid
    ran rose risen said sat sang saw seen sent shown slept sold sought spent spoke spoken stood struck swam taken took
    taught thought threw thrown told understood won wore woven wrote written"""
)
_ENDINGS = (("ies", "y"), ("ied", "y"), ("es", ""), ("s", ""), ("ed", ""), ("ed", "e"), ("ing", ""), ("ing", "e"))


def may_be_verb(word: str) -> bool:
    """Whether it is a common English verb in any of its forms; it may be a noun as well ("plan", "walks").

    Example:
        >>> [may_be_verb(word) for word in ("Imagine", "running", "went", "bird")]
        [True, True, True, False]
    """
    lower = word.casefold().replace("’", "'")
    return lower in _VERBS or lower in _OTHER_VERB_FORMS or any(stem in _VERBS for stem in _stems(lower))


def _stems(word: str) -> list[str]:
    stems = [word.removesuffix(ending) + letter for ending, letter in _ENDINGS if word.endswith(ending)]
    return stems + [stem[:-1] for stem in stems if len(stem) > 2 and stem[-1] == stem[-2]]


_SYLLABLES = {
    "area": 3, "being": 2, "business": 2, "create": 2, "created": 3, "creates": 2, "diet": 2, "doing": 2, "every": 2,
    "evening": 2, "going": 2, "idea": 3, "ideas": 3, "lion": 2, "naive": 2, "people": 2, "poem": 2, "poet": 2,
    "quiet": 2, "react": 2, "really": 2, "science": 2, "seeing": 2, "something": 2, "sometimes": 2, "someone": 2,
    "therefore": 2, "trial": 2, "video": 3, "violet": 3, "were": 1, "whose": 1, "violin": 3,
}  # fmt: skip


def syllables(word: str) -> int:
    """The number of syllables, at least 1: groups of vowels without a silent e; a short list of exceptions.

    Example:
        >>> [syllables(word) for word in ("strength", "table", "hoped", "wanted", "banana")]
        [1, 2, 1, 2, 3]
    """
    letters = re.sub(r"[^a-z]", "", word.casefold())
    if letters in _SYLLABLES:
        return _SYLLABLES[letters]
    groups = len(re.findall(r"[aeiouy]+", letters))
    silent = re.search(r"[^aeiouyl]e$|[aeiouy]le$|[^aeiouytd]ed$|[^aeiouyscxzgh]es$", letters)
    return max(1, groups - bool(silent))
