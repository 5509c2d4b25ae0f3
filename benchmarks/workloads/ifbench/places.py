"""Two small tables for IFBench's questions about places."""

from __future__ import annotations

import unicodedata

# From the north to the south, by the cities' latitudes in degrees.
CAPITALS_NORTH_OF_45 = (
    ("reykjavik", 64.15), ("helsinki", 60.17), ("oslo", 59.91), ("tallinn", 59.44), ("stockholm", 59.33),
    ("riga", 56.95), ("moscow", 55.75), ("copenhagen", 55.68), ("vilnius", 54.69), ("minsk", 53.90), ("dublin", 53.35),
    ("berlin", 52.52), ("amsterdam", 52.37), ("warsaw", 52.23), ("london", 51.51), ("brussels", 50.85),
    ("kyiv", 50.45), ("prague", 50.08), ("luxembourg", 49.61), ("paris", 48.86), ("vienna", 48.21),
    ("bratislava", 48.15), ("budapest", 47.50), ("vaduz", 47.14), ("chisinau", 47.01), ("bern", 46.95),
    ("ljubljana", 46.06), ("zagreb", 45.81),
)  # fmt: skip
CAPITAL_NAMES = {"kiev": "kyiv", "berne": "bern", "luxembourg city": "luxembourg", "kishinev": "chisinau"}

AFRICAN_COUNTRIES = frozenset(
    """algeria/angola/benin/botswana/burkina faso/burundi/cameroon/cape verde/central african republic/chad/comoros/
    democratic republic of the congo/djibouti/egypt/equatorial guinea/eritrea/eswatini/ethiopia/gabon/gambia/ghana/
    guinea/guinea-bissau/ivory coast/kenya/lesotho/liberia/libya/madagascar/malawi/mali/mauritania/mauritius/morocco/
    mozambique/namibia/niger/nigeria/republic of the congo/rwanda/sao tome and principe/senegal/seychelles/
    sierra leone/somalia/south africa/south sudan/sudan/tanzania/togo/tunisia/uganda/zambia/zimbabwe""".replace(
        "\n", ""
    ).replace("    ", "").split("/")
)  # fmt: skip
COUNTRY_NAMES = {
    "cabo verde": "cape verde", "cote d'ivoire": "ivory coast", "swaziland": "eswatini",
    "congo": "republic of the congo", "congo republic": "republic of the congo",
    "congo, republic of the": "republic of the congo",
    "congo-brazzaville": "republic of the congo", "dr congo": "democratic republic of the congo",
    "drc": "democratic republic of the congo", "congo-kinshasa": "democratic republic of the congo",
    "democratic republic of congo": "democratic republic of the congo", "republic of congo": "republic of the congo",
    "congo, democratic republic of the": "democratic republic of the congo", "guinea bissau": "guinea-bissau",
    "the gambia": "gambia", "gambia, the": "gambia", "sao tome & principe": "sao tome and principe",
}  # fmt: skip


def plain(name: str) -> str:
    """The name in lower case without accents, to compare.

    Example:
        >>> plain(" Chișinău ")
        'chisinau'
    """
    parts = unicodedata.normalize("NFKD", name.replace("’", "'").strip().casefold())
    return "".join(part for part in parts if not unicodedata.combining(part))
