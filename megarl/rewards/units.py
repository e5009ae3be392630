"""The words that may accompany a number: units, counted things, and the names that a number is given.

The lists are closed. No word of them changes a number: `dozen`, `pair`, `half`, `less` and `million` are not here.
"""

import re


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


CURRENCIES = ("$", "€", "£", "¥", "₹", "USD", "EUR", "GBP", "INR", "CNY", "JPY", "AUD", "CAD", "CHF", "MXN")
"""Signs and codes of currencies, which may precede a number."""
SYMBOLS = frozenset(CURRENCIES) | words_of(
    """
    % ° °C °F ¢ m km cm mm mi ft in yd kg g mg lb lbs oz l L ml mL s sec min h hr hrs mph kph rpm Hz kHz W kW kWh V Ω
    KB MB GB TB kB
    """
)
"""Signs of units, as they are written."""
_NOUNS = words_of(
    """
    percent degree celsius fahrenheit radian unit point dollar buck cent euro pound pence penny peso rupee yen yuan
    franc ruble dime nickel coin second minute hour day night week weekend weekday month year decade century meter
    metre kilometer kilometre centimeter centimetre millimeter millimetre inch foot feet yard mile acre hectare gram
    kilogram kilo milligram ton tonne ounce liter litre milliliter millilitre quart pint gallon cup tablespoon
    teaspoon calorie kilocalorie joule watt kilowatt volt byte kilobyte megabyte gigabyte terabyte mph
    person people man men woman women child children kid boy girl adult student pupil teacher worker employee client
    customer guest passenger player member friend family classmate patient visitor senior voter resident baby babies
    participant them soldier sailor driver doctor nurse fan
    animal dog cat puppy puppies kitten bird chicken hen duck fish cow goat sheep horse pig rabbit bee bug insect
    ant spider crab lion penguin hamster llama camel rat mouse mice frog turtle butterfly butterflies shark whale
    apple orange banana lemon lime pear peach plum grape mango pineapple watermelon melon berry berries strawberry
    strawberries blueberry blueberries cherry cherries fruit vegetable potato potatoes tomato tomatoes carrot onion
    pepper corn pumpkin coconut cookie cake cupcake pie brownie donut doughnut muffin bagel loaf loaves bread roll
    biscuit pizza slice sandwich sandwiches burger sausage meatball egg candy candies chocolate lollipop marshmallow
    sweet treat snack popsicle cracker chip fry fries meal dish dishes serving portion scoop ice cream water milk
    juice soda coffee tea drink bottle can jar glass glasses mug bag box boxes basket bucket carton crate packet
    pack package bar barrel tube tub tray pot pan plate bowl fork spoon knife knives
    book page word letter message email call question problem test quiz exam lesson class classes chapter story
    stories article magazine newspaper poem song movie video film game match show episode photo picture painting
    poster stamp card ticket sticker note notebook pen pencil marker crayon eraser folder sheet paper toy ball
    balloon doll marble puzzle block brick piece part bead ring stone rock shell seashell star badge medal key
    button ribbon candle light bulb lamp battery batteries phone computer laptop machine robot camera
    shirt shoe sock hat dress dresses skirt coat jacket glove scarf uniform outfit mask necklace bracelet earring
    bow bale stripe patch stitch stitches blanket pillow towel quilt rug curtain
    car truck bus buses bike bicycle wheel tire train plane boat ship vehicle seat trip ride lap step stop turn
    flight
    house home room door window wall floor table chair desk bed shelf shelves apartment building school store shop
    city cities town village street road farm field garden park pool bench benches
    tree plant flower rose tulip petal leaf leaves seed bush bushes branch branches log stick bouquet vine sunflower
    item thing object group set team row column line section level round time way job task shift load batch batches
    bundle stack pile goal vote sign sale prize gift present bill tip pet nail screw bolt tile board panel pole post
    crop grain bean nut peanut almond walnut pancake waffle dumpling noodle salad soup
    """
)
_MONEY = words_of("dollar buck cent euro pound peso rupee yen yuan franc ruble")
_QUANTITIES = {
    word: unit
    for unit, *words in map(
        str.split,
        """
        mm mm millimeter millimetre
        cm cm centimeter centimetre
        m m meter metre
        km km kilometer kilometre
        in inch inche
        ft ft foot feet
        mi mi mile
        yd yd yard
        s s sec second
        min min minute
        h h hr hour
        g g gram
        kg kg kilogram kilo
        mg mg milligram
        l L l liter litre
        ml mL ml milliliter millilitre
        dollar $ dollar buck
        pound pound lb £
        ounce ounce oz
        euro euro €
        yen yen ¥
        rupee rupee ₹
        cent cent penny ¢
        day day
        week week
        month month
        year year
        degree degree
        celsius celsius
        fahrenheit fahrenheit
        radian radian
        percent percent
        gallon gallon
        acre acre
        hectare hectare
        """.strip().splitlines(),
    )
    for word in words
}
"""Units that exclude each other, by their words and signs in the singular; a line has a unit and its words."""
_JOINING = words_of(
    """
    per a an the of in on at for to from each every his her their its my our total altogether left remaining overall
    square cubic sq cu more new old extra additional red blue green white black yellow
    """
)
"""Words that may connect units, precede one or follow one."""
_ALONE = words_of("total altogether each left remaining overall")
"""Words that may follow a number without a unit."""
_NAMES = words_of(
    """
    the my our a final total overall correct numerical answer result value sum product difference quotient profit cost
    price age amount number revenue income distance time speed area perimeter volume length width height weight
    solution it
    """
)
_MAX_WORDS = 8
_LETTERS = re.compile(r"[^\W\d_]+")
_SPEEDS = re.compile(r"\b(?:(mph)|kph|kmh)\b")
_PART = re.compile(r"[$€£¥₹¢/]|[0-9]+|[^\W\d_]+|\^ ?\{? ?-?[1-3] ?\}?|[²³]|'")
_POWER = re.compile(r"(?<=[a-z]) ?(?:\^ ?[23]|[²³])(?= |/|$)")


def is_unit(word: str) -> bool:
    """Return whether a word is a unit or a counted thing, in the singular or the plural, or the sign of a unit."""
    small = word.lower()
    return word in SYMBOLS or small in _NOUNS or small.removesuffix("s") in _NOUNS or small.removesuffix("es") in _NOUNS


def is_unit_phrase(text: str, *, of_money: bool = False) -> bool:
    """Return whether a text may follow a number, up to the end of the answer: nothing, a unit, `dollars per day`.

    It ends in one punctuation mark at most. If a currency precedes the number (`of_money`), no sign of a unit
    follows it directly, since `$18 m` are millions.
    """
    phrase = text.rstrip()
    if phrase.endswith((".", ",")) or (phrase.endswith("!") and phrase[:-1].strip()):
        phrase = phrase[:-1].rstrip()
    words = _POWER.sub("", phrase).split()
    parts = [part for word in words for part in re.split("(/)", word) if part]
    if not parts:
        return True
    if phrase == "m" or parts[-1] == "/" or (of_money and parts[0] in SYMBOLS):  # 18m are millions, 18 m are metres
        return False
    known = [part for part in parts if part != "/"]
    has_money = any(part in CURRENCIES or part.lower().removesuffix("s") in _MONEY for part in known)
    num_signs = sum(part in SYMBOLS and not part.isalpha() for part in known)
    if num_signs > 1 or ("m" in known and has_money):
        return False
    if len(known) > _MAX_WORDS or "//" in phrase.replace(" ", ""):
        return False
    has_unit = any(is_unit(part) or part.lower() in _ALONE for part in known)
    return has_unit and all(is_unit(part) or part.lower() in _JOINING for part in known)


Quantities = frozenset[tuple[str, int]]
"""Units with their powers: those of `5 m/s` are m with 1 and s with -1."""


def quantities_of(text: str, *, single_letters: bool) -> Quantities:
    """Return the units in a text that other units exclude: metres are no centimetres, and no square metres.

    A single letter is a unit with `single_letters` or after a quotation mark, since it may be a variable.
    """
    found = list[tuple[str, int]]()
    sign = 1
    factor = 1
    is_open = False
    before = ""
    for part in _PART.findall(_SPEEDS.sub(lambda speed: "mile/hour" if speed[1] else "km/hour", text)):
        word = part.lower()
        singular = word.removesuffix("s") if len(word) > 2 else word
        unit = _QUANTITIES.get(part) or _QUANTITIES.get(word) or _QUANTITIES.get(singular)
        if part[0] in "^²³":
            if is_open:
                name, power = found[-1]
                found[-1] = name, power * int({"²": "2", "³": "3"}.get(part) or part.strip("^{ }"))
            is_open = False
        elif part == "/" or word == "per":
            sign = -1
            is_open = False
        elif word in ("square", "sq", "cubic", "cu"):
            factor = 3 if word.startswith("cu") else 2
            is_open = False
        elif unit and (len(part) > 1 or not part.isalpha() or single_letters or before == "'"):
            found.append((unit, sign * factor))
            sign = 1
            factor = 1
            is_open = True
        elif part != "'":
            is_open = False
            if part.isdigit():
                sign = 1
                factor = 1
        before = part
    return frozenset(found)


def exclude(some: Quantities, others: Quantities) -> bool:
    """Return whether two texts have different units. A text without units excludes none.

    A degree may be of an angle or of heat, and beside other units it may belong to an angle in a formula; the price of
    a thing may be given as money alone.
    """
    if not some or not others or some == others:
        return False
    degree = {("degree", 1)}
    first = some - degree
    second = others - degree
    if not first or not second:
        both_have_degrees = degree <= some and degree <= others
        return not both_have_degrees
    prices = {unit for unit in first if unit[0] in _MONEY}
    other_prices = {unit for unit in second if unit[0] in _MONEY}
    if prices and other_prices:
        return prices != other_prices
    return first != second


def is_name(text: str) -> bool:
    """Return whether a text names a number, as `x`, `answer` and `the total cost` do."""
    words = text.split()
    if len(words) == 1 and len(words[0]) == 1:
        return words[0].isalpha()
    return 0 < len(words) <= 4 and all(_LETTERS.fullmatch(word) and word.lower() in _NAMES for word in words)
