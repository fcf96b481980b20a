"""Words behind a number: units, which may be left out, and factors, which may not."""

from __future__ import annotations

import re

_NAMES = {
    spelling: name
    for name, spellings in {
        "mm": "mm millimeter millimetre",
        "cm": "cm centimeter centimetre",
        "m": "m meter metre",
        "km": "km kilometer kilometre",
        "in": "in inch inches",
        "ft": "ft foot feet",
        "yd": "yd yard",
        "mi": "mi mile",
        "mg": "mg milligram",
        "g": "g gram",
        "kg": "kg kilogram",
        "lb": "lb pound",
        "oz": "oz ounce",
        "ton": "ton tonne",
        "ml": "ml milliliter millilitre",
        "l": "liter litre",
        "gal": "gal gallon",
        "s": "s sec second",
        "min": "min minute",
        "h": "h hr hour",
        "day": "day",
        "week": "week",
        "month": "month",
        "year": "yr year",
        "dollar": "dollar",
        "cent": "cent",
        "euro": "euro",
        "percent": "percent",
        "degree": "degree deg",
        "radian": "radian rad",
        "mi/h": "mph",
        "km/h": "kmh kph",
        "": "unit point way people person student child children boy girl man men woman women apple orange egg book page "
        "card coin ball marble cookie ticket word letter digit game vote step piece item time solution case number "
        "triangle square cube integer permutation arrangement combination outcome possibility path pair",
    }.items()
    for spelling in spellings.split()
}
"""Whatever is counted has the name "": it goes with every other."""
_POWERS = {"square": "2", "sq": "2", "squared": "2", "²": "2", "cubic": "3", "cu": "3", "cubed": "3", "³": "3"}
_SIDE = re.compile(
    r"(?:(?P<before>square|sq|cubic|cu)\.? )?(?P<word>[a-zA-Z]+)\.?"
    r"(?:\s*\^\s*\{?(?P<power>\d)\}?|\s*(?P<after>squared|cubed|²|³))?"
)
_COUNTED = re.compile(r"[a-z]{2,}s")
"""Any other plural (``zebras``) is something that is counted, except for what changes the number."""
_NO_COUNT = re.compile(
    "times|plus|minus|less|yes|this|is|was|has|does|always|perhaps|besides|guess|maybes|"
    "couples|scores|gross|tens|dozens|hundreds|thousands|lakhs|crores|myriads|[a-z]+illions|"
    "doubles|triples|multiples|powers|exponents|factorials|logs|mods|squared|inverses|reciprocals|negatives|opposites|"
    "halves|thirds|quarters|[a-z]+(?:nths|rths|fths|xths|hths|dths)"
)
FACTORS = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}


def factor(words: str) -> tuple[int, str]:
    """What a number is multiplied by (``million dollars``: 1000000), and the words behind that."""
    first, _, rest = words.partition(" ")
    times = FACTORS.get(first.casefold())
    return (1, words) if times is None else (times, rest.strip())


def unit(words: str) -> str | None:
    """The unit that words are, all of them (``square centimeters``: ``cm2``, ``miles per hour``: ``mi/h``); else None."""
    sides = [_side(side) for side in re.split(r"\s*/\s*|\s+per\s+", words.strip())]
    return None if None in sides else "/".join(filter(None, sides))


def _side(text: str) -> str | None:
    found = _SIDE.fullmatch(text)
    if found is None:
        return None
    name = _named(found["word"])
    if not name:
        return name
    return name + (found["power"] or _POWERS.get(found["before"] or found["after"] or "", ""))


def _named(word: str) -> str | None:
    if len(word) < 3:
        return _NAMES.get(word)
    small = word.casefold()
    known = _NAMES.get(small, _NAMES.get(small.removesuffix("s")))
    return "" if known is None and _COUNTED.fullmatch(word) and not _NO_COUNT.fullmatch(word) else known
