"""Which language a text is in, by its script and its frequent words: an approximation for IFEval's language kind."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

SCRIPT_SHARE = 0.7
_FREQUENT = {
    "LATIN": {
        "en": (
            "the of and to in is that it for was with as on are this you be at have not by from or an they which "
            "a about out any your my we he she his her all will would can do what there their if one so has had but"
        ),
        "de": "der die das und ist nicht ein eine zu mit sich auf für von den dem im auch es ich sie wir wird sind",
        "pt": "o a os as de que e do da em um uma para com não é no na se por mais dos das como mas ao são você",
        "es": "el la los las de que y en un una para con no es se por más del como pero al lo su son está muy también",
        "fr": "le la les de et des est un une pour dans que qui pas avec sur ce il elle nous vous au du en sont mais",
        "it": "il la lo gli le di che e è un una per con non in del della si da sono come più ma al nel anche questo",
        "fi": "ja on ei se että hän oli ovat mutta niin kun myös joka tai voi kuin jos olla minä sinä tämä ole sen",
        "sw": "na ya wa kwa ni katika la za cha kuwa hii hiyo yake kama hivyo lakini pia au si watu wao sana kila",
        "vi": "là và của có không một những được cho với trong này các để người đã cũng như khi thì đó tôi bạn về",
    },
    "CYRILLIC": {
        "ru": "и в не на что я с это как он но по из они у за то все так его от мы для же было или если когда",
        "bg": "и в не на че се да от е за са по като но това той с ще към или който има си при до беше му със",
        "uk": "і в не на що я з це як він але по та й у за то все так його від ми для ж було або якщо коли є",
    },
    "DEVANAGARI": {
        "hi": "है हैं में की के का और से को पर यह कि नहीं एक भी तो था लिए हो इस वह ने कर या साथ",
        "mr": "आहे आहेत आणि च्या ला मध्ये हे ही हा तो ती या की नाही एक पण होते केले करून असे त्या मी साठी",
        "ne": "छ छन् र को मा लाई हो यो पनि गर्न भएको हुन्छ एक छैन तर ले बाट गर्ने उनी म के भने लागि हुने",
    },
    "ARABIC": {
        "ar": "في من على إلى أن التي الذي هذا هذه لا ما مع كان عن هو هي أو كل ذلك قد لم بين بعد و",
        "fa": "در به از که این را است با برای آن یک می و هم خود تا یا ما شود شده بود هر باید ها",
        "ur": "کے میں کی ہے اور سے کا کو یہ پر ہیں نے کہ ایک بھی تو اس وہ نہیں تھا لیے ہو کر یا",
    },
}
_SCRIPTS = {
    "kn": ("KANNADA",), "pa": ("GURMUKHI",), "gu": ("GUJARATI",), "te": ("TELUGU",), "ta": ("TAMIL",),
    "th": ("THAI",), "bn": ("BENGALI",), "ko": ("HANGUL",), "el": ("GREEK",), "he": ("HEBREW",), "zh": ("CJK",),
    "ja": ("CJK", "HIRAGANA", "KATAKANA"),
    **{code: (script,) for script, languages in _FREQUENT.items() for code in languages},
}  # fmt: skip


def is_in(text: str, language: str) -> bool:
    """Whether the text is in a language.

    Args:
        text: Some sentences; names in another script are no harm.
        language: An ISO 639-1 code that we know.

    Raises:
        ValueError: If we do not know the language.

    Example:
        >>> is_in("Das ist nicht schlecht, und es wird besser.", "de"), is_in("This is not so bad.", "de")
        (True, False)
    """
    if language not in _SCRIPTS:
        raise ValueError(f"language {language!r} is unknown: choose one of {', '.join(sorted(_SCRIPTS))}")
    wanted = _SCRIPTS[language]
    scripts = Counter(_script(character) for character in text[:20_000] if character.isalpha())
    if not scripts or sum(scripts[script] for script in wanted) < SCRIPT_SHARE * sum(scripts.values()):
        return False
    rivals = _FREQUENT.get(wanted[0], {})
    return len(rivals) < 2 or _is_likeliest(text, language, rivals)


def _script(letter: str) -> str:
    return unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0]


def _is_likeliest(text: str, language: str, rivals: dict[str, str]) -> bool:
    used = Counter(re.split(r"[\s.,;:!?()\"'،۔؟।«»“”*_-]+", text.casefold()))
    hits = {code: sum(used[word] for word in set(frequent.split())) for code, frequent in rivals.items()}
    return hits[language] == max(hits.values()) > 0
