"""Take a unit, a currency sign, a degree sign or a percent sign off a quantity."""

from __future__ import annotations

import re
from dataclasses import dataclass

from apportion.verify.numerals import WORDS

# Spellings of one unit, the first being its name here. Only what answers really use; other words are units
# under their own name.
_SPELLINGS = """
USD usd dollar dollars buck bucks; EUR € euro euros; GBP £ pound-sterling; INR ₹ rupee rupees rs; JPY ¥ yen;
cent cents ¢; deg degree degrees; rad radian radians;
m meter meters metre metres; cm centimeter centimeters centimetre centimetres; mm millimeter millimeters;
km kilometer kilometers kilometre kilometres; in inch inches; ft foot feet; yd yard yards; mi mile miles;
g gram grams; kg kilogram kilograms kgs; mg milligram milligrams; lb lbs pound pounds; oz ounce ounces; ton tons;
s sec secs second seconds; min mins minute minutes; h hr hrs hour hours; day days; week weeks; month months;
year years yr yrs; l liter liters litre litres L; ml mL milliliter milliliters; gal gallon gallons;
mph miles/hour mi/h mi/hr miles-per-hour; km/h kmh kph kilometers-per-hour; m/s meters-per-second; unit units;
""".replace("\n", " ")
_NAMES = {spelling: group.split()[0] for group in _SPELLINGS.split(";") if group.strip() for spelling in group.split()}
# Glued to a number ("5km") only these are units: "5xyz" is a product. Single letters never are, outside \text{}.
_GLUED = "|".join(
    sorted((re.escape(name) for name in _NAMES if len(name) > 1 and name.isalpha()), key=len, reverse=True)
)
_NOT_UNIT = re.compile(
    r"(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|sqrt|mod|max|min|gcd|lcm|pi|choose|and|or|is|are|if|for|the|of|"
    r"such|that|where|when|with|all|any|not|no|yes",
    re.IGNORECASE,
)

_TEXT_TAIL = re.compile(
    r"(?P<value>.*?\S)(?P<unit>(?: |/|\\cdot)*\\text\{[^{}]*\}(?: |/|\\cdot|\\text\{[^{}]*\}|\^ ?\{? ?-?\d ?\}?)*)"
)
_TEXT_HEAD = re.compile(r"(?:\\text\{ ?)?(?P<unit>USD|EUR|GBP|Rs\.?|€|£|₹|¥)(?: ?\})? ?(?P<value>[-+]?[\d.\\].*)")
_SIGN_HEAD = re.compile(
    r"(?P<minus>-?) ?(?:\\text\{USD\}|(?P<unit>[€£₹¥])|(?:\\pounds|\\euro) ?) ?(?P<value>-?[\d.].*)"
)
_DEGREES = re.compile(r"(?P<value>.*\S) ?\^\\circ ?(?P<scale>[CF]|\\text\{ ?[CF] ?\})?")
# In \cos 30^\circ the degrees are the argument's.
_IN_FORMULA = re.compile(r"\^\\circ|\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
_GLUED_TAIL = re.compile(
    rf"(?P<value>.*(?:[\d)}}]|\\pi)) ?(?P<unit>(?:{_GLUED})(?:/(?:{_GLUED}|[sh]))?(?: ?\^ ?\{{?[23]\}}?)?)"
)
_RATE_TAIL = re.compile(
    r"(?P<value>.*[\d)}]) ?(?P<unit>(?:k?m|cm|ft|mi|k?g|L|gal)/(?:s|sec|h|hr|min|L)(?: ?\^ ?\{?2\}?)?)"
)
_WORD_TAIL = re.compile(r"(?P<value>[-+]?[\d.,/ ]*\d|.*\}) (?P<unit>[A-Za-z]{2,}[A-Za-z /.\-]*(?:\^ ?\{?[23]\}?)?)")
_BASE = re.compile(
    r"(?P<open>\(?)(?P<value>[0-9A-F]*\d[0-9A-F]*)(?(open)\)?) ?_ ?\{ ?(?:\\text\{)?(?P<base>\d+|[a-z]+)\}? ?\}"
)
# In the text after a number these say another thing than a unit.
_NO_UNIT = re.compile(
    r"\b(?:and|or|not|half|quarter|least|most|more|less|fewer|dozen|hundred|if|when|plus|minus|times)\b"
)
# Minutes and seconds of arc, feet and inches.
_PRIMES = re.compile(r"(?P<value>.*\d) ?(?P<unit>''?)")
PRIMES = {"'": ("ft", "min", "arcmin", "arcminute"), "''": ("in", "s", "arcsec", "arcsecond")}
_PERCENT = re.compile(r"(?P<value>.*[^\s%]) ?(?:%|\\text\{ ?(?:percent|per cent|%) ?\}|percent|per cent)")


@dataclass(frozen=True)
class Quantity:
    """`value` is what stays for the number; `unit` its unit under one spelling."""

    value: str
    unit: str | None = None
    percent: bool = False


def unit_name(written: str) -> str:
    """One spelling for a unit: "square centimeters", "cm^2" and "\\text{ cm}^{2}" are all `cm^2`."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1 ", written).replace("\\cdot", " ")
    plain = re.sub(r"[{}\s.]+", " ", plain).strip()
    plain = re.sub(r"\s*\^\s*", "^", plain)
    plain = re.sub(r" ([A-Za-z]+)\^-1$", r"/\1", plain)
    plain = re.sub(r" ([A-Za-z]+)\^-([23])$", r"/\1^\2", plain)
    squared = re.fullmatch(r"(?:square|sq) (.+)|(.+) squared", plain)
    cubed = re.fullmatch(r"(?:cubic|cu) (.+)|(.+) cubed", plain)
    for match, power in ((squared, "^2"), (cubed, "^3")):
        if match:
            plain = (match.group(1) or match.group(2)) + power
    base, caret, power = plain.partition("^")
    parts = [
        _NAMES.get(part, _NAMES.get(part.lower(), part.lower().removesuffix("s") if len(part) > 2 else part))
        for part in re.split(r"\s*/\s*| per ", base)
    ]
    name = "/".join(part.strip() for part in parts)
    return _NAMES.get(name, name) + caret + power


def same_unit(a: str, b: str) -> bool:
    """Whether two names (`unit_name`) are one unit; a prime stands for several."""
    return a == b or a in PRIMES.get(b, ()) or b in PRIMES.get(a, ())


def _usable(value: str) -> bool:
    """A unit must follow something that can end a number, not an operator."""
    return bool(value) and value[-1] not in "+-=<>^_/,(\\" and not value.endswith((r"\cdot", r"\times"))


def split_unit(text: str) -> Quantity:
    """`text` parted into number and unit; the text itself as `value` when it carries none."""
    if match := _BASE.fullmatch(text):
        base = WORDS.get(match["base"], match["base"])
        return Quantity(match["value"], f"base {base}")
    if match := _SIGN_HEAD.fullmatch(text):
        return Quantity(match["minus"] + match["value"], unit_name(match["unit"] or "USD"))
    if match := _TEXT_HEAD.fullmatch(text):
        return Quantity(match["value"], unit_name(match["unit"]))
    if (match := _PERCENT.fullmatch(text)) and _usable(match["value"]):
        return Quantity(match["value"], percent=True)
    if (match := _DEGREES.fullmatch(text)) and _usable(match["value"]) and not _IN_FORMULA.search(match["value"]):
        scale = re.sub(r"[^CF]", "", match["scale"] or "").replace("text", "")
        return Quantity(match["value"], "deg" + scale)
    if match := _PRIMES.fullmatch(text):
        return Quantity(match["value"], match["unit"])
    if (match := _TEXT_TAIL.fullmatch(text)) and _usable(match["value"]) and not _NO_UNIT.search(match["unit"]):
        unit = unit_name(match["unit"])
        if re.fullmatch(r"(?:st|nd|rd|th)", unit):
            return Quantity(match["value"])
        return Quantity(match["value"], unit or None)
    if (match := _RATE_TAIL.fullmatch(text) or _GLUED_TAIL.fullmatch(text)) and _usable(match["value"]):
        return Quantity(match["value"], unit_name(match["unit"]))
    if (match := _WORD_TAIL.fullmatch(text)) and _usable(match["value"]):
        first = re.split(r"[ /.\-]", match["unit"])
        if not any(_NOT_UNIT.fullmatch(word) or _NO_UNIT.fullmatch(word) for word in first):
            return Quantity(match["value"], unit_name(match["unit"]))
    return Quantity(text)
