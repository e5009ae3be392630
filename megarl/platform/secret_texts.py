"""Detection of secrets in texts: in URIs, after secret names, and by the formats of known tokens.

Model output and foreign messages pass through here, so the time is linear in the length of any text: repetitions are
possessive or bounded, and no search begins inside the text that another search has consumed.
"""

import re
from typing import NamedTuple

from megarl.platform.secret_names import Secrecy, secrecy_of_path

BLOT = "***"

_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
    r"|(?<![A-Za-z0-9])(?:(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"(?:[\s:;,/|'\"=]{1,4}[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=]))?"
    r"|(?:hf|api_org|gh[oprsu]|npm|gsk|r8|tgp_v1|dop_v1)_[A-Za-z0-9]{20,}+|nvapi-[\w-]{20,}+"
    r"|(?:github_pat|dckr_pat)_[\w-]{20,}+|gl[a-z]{2,5}-[\w-]{20,}+|xox[a-z]-[\w-]{10,}+|xapp-[\w-]{10,}+"
    r"|(?:[spr]k_(?:live|test)|whsec)_[A-Za-z0-9]{10,}+"
    r"|AIza[\w-]{30,}+|ya29\.[\w-]{20,}+|hv[sb]\.[\w-]{20,}+|SG\.[\w-]{16,}+\.[\w-]{16,}+"
    r"|(?:sk|xai|pplx)-(?=[a-z_-]{0,64}+[A-Z0-9])[\w-]{20,}+|pypi-(?=[a-z0-9_-]{0,64}+[A-Z])[\w-]{20,}+"
    r"|(?<![\w-])eyJ[\w-]{8,}+\.[\w-]{8,}+(?:\.[\w-]*+)?)",
    re.DOTALL,
)
_WEBHOOK = re.compile(
    r"(?i)((?<![\w.-])(?:hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks)/)"
    r"[\w/.~-]{8,}+"
)
_BEARER = re.compile(r"(?i:\b(bearer[ \t]{1,8}))(?=[a-z]*+[A-Z0-9_~+/=-]|[a-z]{20})[\w.~+/-]{8,}+=*+")

_AUTHORITY = re.compile(r":(//?)((?:(?!(?<=[,;|=(\[{<>])[A-Za-z][A-Za-z0-9+.-]{0,15}://)[^\s'\"])++)")
"""The part of a URI after the scheme, up to a space, a quote or the next URI of a list."""
_USER_AND_PORT = re.compile(r"[^:/?#]*+(?::(?P<port>\d{0,5})(?:[/?#]|\Z)|(?P<password>:))?")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}\Z")
_SCHEMES_WITHOUT_PASSWORDS = ("hdfs", "viewfs", "webhdfs", "swebhdfs")
_SCHEMES_WITHOUT_USERS = ("http", "https", "git+http", "git+https", "ws", "wss")
"""In these schemes a user without a password is a token. In abfss and ssh it is a name."""

_NAMED = re.compile(
    r"(?<![\w.-])(?P<name>(?P<dashes>--?+(?=[A-Za-z]))?[\w.-]++)"
    r"(?:(?P<quoted>\\{0,7}['\"]\s{0,40}+(?:=>|[:=])\s{0,40}+)"  # a key of JSON or of a printed dict
    r"|(?P<pair>\\{0,7}['\"],\s{0,40}+(?=b?\\{0,7}['\"]))"  # as lists of HTTP headers are printed
    r"|(?P<loose>[ \t]{0,8}+(?::=|=>|[:=])[ \t]{1,8}+|[ \t]{1,8}+=(?![=~])|:(?=[^\s:=]))"
    r"|(?P<tight>=(?![=~]))"
    r"|(?P<option>(?(dashes)[ \t]{1,8}+(?=[^\s-])|(?!))))"
)
_IN_QUERY = ("key", "code", "pwd", "pass", "auth")
_OPENING = re.compile(r"(?:b|r|u|f|br|rb)?(?P<slashes>\\{0,7})(?P<quote>'{3}|\"{3}|['\"])")
_QUOTE_OF_SHELL = re.compile(r"'(?:\\'|\"'\")'")
_OPENS_PAIR = re.compile(r"[(\[]b?\\{0,7}['\"]\Z")
_MARKS = re.compile(r"(\\*+)(['\"])|([\[({])|([\])}])")
_RAW = re.compile(r"(?:[^\s'\"&;,]|['\"&;,](?!\s|\Z|[)\]}>:,;.]|[\w.%-]{1,80}[=:]))++")
_TRAILING = ")]}>.,;:'\""
_SCHEME_OF_HEADER = re.compile(r"(?i:basic|bearer|token|api-?key|digest|negotiate)[ \t]{1,8}")
_COUNT = re.compile(r"[-+]?[\d_,]{1,9}(?:\.\d{1,20})?%?")
_NO_SECRET = re.compile(
    r"\*{3}|(?i:none|null|nil|true|false|yes|no|required|optional|missing|unset|empty|invalid|unknown|expired|wrong"
    r"|str|string|int|bytes|any|path)|(?:Optional|Union|Literal|list|dict|Sequence|Mapping)\[.*"
    r"|(?:self|args|cls|config|cfg|settings|os|environ|getpass)\.\w.*|(?:input|getpass|getenv|str)\(.*|\$\{?\w+\}?|\|",
    re.DOTALL,
)
_PROSE = re.compile(r"[A-Za-z]{1,5}[ \t]{1,8}[A-Za-z]")
_MAX_ORDINARY = 200
"""Characters of the longest value that may turn out to be no secret. Longer values are not read twice."""

_PIECE = re.compile(r"[^\s'\",;:()\[\]{}]+")


def blot_shapes(text: str) -> str:
    """Hide tokens of known formats, private keys, and tokens after `Bearer`."""
    text = _WEBHOOK.sub(rf"\1{BLOT}", _SHAPES.sub(BLOT, text))
    return _BEARER.sub(rf"\1{BLOT}", text)


def blot_users(text: str) -> str:
    """Hide `user:password@` of URIs, even with slashes, and `token@` if the scheme has no named users."""
    return _AUTHORITY.sub(_without_user, text)


def _without_user(match: re.Match[str]) -> str:
    slashes, rest = match.groups()
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    scheme = (_SCHEME.search(match.string, max(0, match.start() - 16), match.start()) or [""])[0].lower()
    last, host = rest.rfind("@"), authority.rfind("@")
    parts = _USER_AND_PORT.match(rest, host + 1 if ":" not in authority[: host + 1] else 0)
    has_password = parts and parts["password"]
    if parts and parts["port"] is not None:
        name = parts[0].partition(":")[0]
        is_host = name == "localhost" or "." in name or scheme in _SCHEMES_WITHOUT_PASSWORDS
        has_password = not is_host and parts.end() <= last
    if has_password and last > 0:
        return f":{slashes}{BLOT}{rest[last:]}"
    if host > 0 and (scheme in _SCHEMES_WITHOUT_USERS or _looks_random(rest[:host])):
        return f":{slashes}{BLOT}{rest[host:]}"
    return match[0]


def blot_named(text: str) -> str:
    """Hide values of secret names: `NAME=S`, `NAME: S`, `"NAME": S`, `("NAME", "S")`, `--name S`."""
    pieces, done, place = [], 0, 0
    while match := _NAMED.search(text, place):
        place = match.end()
        if span := _secret_span(match):
            pieces += [text[done : span[0]], BLOT]
            done = place = span[1]
    return "".join([*pieces, text[done:]])


def _secret_span(match: re.Match[str]) -> tuple[int, int] | None:
    """Return the begin and the end of the secret after a name; None if there is no secret."""
    text, start, level = match.string, match.end(), _secrecy(match)
    if level is Secrecy.NO:
        return None
    if match["loose"] and (scheme := _SCHEME_OF_HEADER.match(text, start)):
        start = scheme.end()
    if _is_ordinary(match, level, _Value.at(text, start, start + _MAX_ORDINARY)):
        return None
    value = _Value.at(text, start, len(text))
    return value.start, value.end


def _secrecy(match: re.Match[str]) -> Secrecy:
    """Return the secrecy of the name in a match of `_NAMED`."""
    text, name, start = match.string, match["name"], match.start()
    before = text[max(0, start - 1) : start]
    if before in ("?", "&") and name.lower() in _IN_QUERY:
        return Secrecy.YES
    if match["pair"] and not match["dashes"] and not _OPENS_PAIR.search(text[max(0, start - 10) : start]):
        return Secrecy.NO
    return secrecy_of_path(name[1:] if before == "\\" and name[0] in "nrt" else name)


def _is_ordinary(match: re.Match[str], level: Secrecy, value: "_Value") -> bool:
    """Return whether the value of a secret name is no secret: empty, a count, a piece of code or of prose."""
    text = match.string
    plain = text[value.start : value.end]
    if not plain or plain == match["name"] or _NO_SECRET.fullmatch(plain):  # f(token=token)
        return True
    if level is Secrecy.PERHAPS and (match["loose"] or text[value.start] in "([{"):
        return not _looks_random(plain)
    if level is Secrecy.PERHAPS:
        return bool(_COUNT.fullmatch(plain))
    return bool(match["loose"] and value.is_bare and _PROSE.match(text, value.start))


def _looks_random(text: str) -> bool:
    """Return whether a piece of the text mixes letters and digits, or is longer than a word."""
    return any(
        (len(piece) >= 20 and not {"/", "\\"} & set(piece))
        or (len(piece) >= 8 and any(map(str.isdigit, piece)) and any(map(str.isalpha, piece)))
        for piece in _PIECE.findall(text)
    )


class _Value(NamedTuple):
    """The begin and the end of a value, without its quotes."""

    start: int
    end: int
    is_bare: bool

    @classmethod
    def at(cls, text: str, start: int, until: int) -> "_Value":
        """Return the value that begins at `start`; do not read characters from `until` on."""
        if opening := _OPENING.match(text, start, until):
            return cls(opening.end(), _closing(text, opening, until), is_bare=False)
        if text[start : start + 1] in ("(", "[", "{"):
            return cls(start, _closing_bracket(text, start, until), is_bare=False)
        raw = _RAW.match(text, start, until)
        return cls(start, start + len(raw[0].rstrip(_TRAILING)) if raw else start, is_bare=True)


def _closing(text: str, opening: re.Match[str], until: int) -> int:
    """Return the end of a quoted value; the end of the line if no quote closes it."""
    start, mark = opening.end(), opening["quote"]
    if len(mark) == 3:
        end = text.find(mark, start, until)
    else:
        end = _quote_after(text, start, until, mark, len(opening["slashes"]))
        while end >= 0 and (joined := _QUOTE_OF_SHELL.match(text, end, until)):
            end = _quote_after(text, joined.end(), until, mark, 0)
    if end < 0:
        end = text.find("\n", start, until)
    return until if end < 0 else end


def _quote_after(text: str, start: int, until: int, quote: str, num_slashes: int) -> int:
    """Return the end of a text that `quote` after `num_slashes` backslashes opened; -1 if nothing closes it.

    Each level of quoting doubles the backslashes and adds one before a quote.
    """
    for mark in _MARKS.finditer(text, start, until):
        if mark[2] == quote and len(mark[1]) % (2 * (num_slashes + 1)) == num_slashes:
            return mark.end() - 1 - num_slashes
    return -1


def _closing_bracket(text: str, start: int, until: int) -> int:
    """Return the position after the bracket that closes the bracket at `start`; `until` if the text was cut."""
    depth, inside = 0, None
    for mark in _MARKS.finditer(text, start, until):
        slashes, quote, opens, _ = mark.groups()
        if inside:
            if quote == inside[0] and len(slashes) % (2 * (inside[1] + 1)) == inside[1]:
                inside = None
        elif quote:
            inside = quote, len(slashes)
        else:
            depth += 1 if opens else -1
            if depth == 0:
                return mark.end()
    return until
