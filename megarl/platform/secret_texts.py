"""Detection of secrets in texts: in URIs, in `NAME=VALUE`, and by the formats of known tokens.

It reads quotes only around the value of `NAME='VALUE'`: whoever shows a mapping redacts the mapping
(`megarl.platform.secrets.redacted`). Model output and foreign messages pass through here, so the time is linear in the
length of any text: repetitions are possessive or bounded, and no search begins inside the text that another search has
consumed.

The formats are those of tokens and private keys of services that a run may meet. Each begins with letters that only
this service uses.
"""

import re

from megarl.platform.secret_names import Secrecy, secrecy_of_path

REDACTED = "***"

_AFTER_ESCAPE = (
    r"(?<=\\[nrtbfv0])|(?<=\\x[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4})|(?<=%[0-9A-Fa-f]{2})|(?<=%25[0-9A-Fa-f]{2})"
)
"""The end of a newline or another character that JSON, Python or a URL wrote as letters."""
_START = rf"(?:(?<![A-Za-z0-9])|{_AFTER_ESCAPE})"
_START_OF_JWT = rf"(?:(?<![\w-])|{_AFTER_ESCAPE})(?:[A-Za-z0-9]{{1,12}}_){{0,3}}"
_PRIVATE_KEY = (
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
)
_LETTERS_AND_DIGITS = "|".join(
    (
        *("hf", "api_org", "gsk", "r8", "tgp_v1", "fw", "rpa", "e2b", "pcsk", "csk"),  # models and devices
        *("gh[oprsu]", "npm", "rubygems", "do[opr]_v1", "vc[aikpr]", "sbp", "lin_api", "ntn", "pn[ub]"),  # code
        *("shp(?:at|ca|pa|ss|tka)", "ddp", "sk(?=_[0-9a-f]{48}(?![A-Za-z0-9]))"),
    )
)
_WORDS = "|".join(
    (
        *("github_pat", "dckr_pat", "wandb_v1", "lsv2_[a-z]{2}", "sntry[su]", "figd", "sb_secret", "fm2", "jina"),
        *("pscale_(?:tkn|pw|oauth)", "secret_labs", "bb_(?:live|test)", "glsa", "glc"),
    )
)
_WORDS_AFTER_DASH = "|".join(
    ("nvapi", "tvly", "GOCSPX", "tskey-[a-z]{3,8}", "PMAK", "HRKU", "NRAK", "csk", "xox[a-z]", "xapp")
)
_TOKENS = (
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])(?:[\s:;,/|'\"=]{1,4}[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=]))?",
    rf"(?:{_LETTERS_AND_DIGITS})_[A-Za-z0-9]{{20,}}+",
    rf"(?:{_WORDS})_(?=[a-z_-]{{0,64}}+[A-Z0-9])[\w-]{{20,}}+=*+",
    rf"(?:{_WORDS_AFTER_DASH})-[\w-]{{10,}}+",
    r"gl[a-z]{2,5}-[\w-]{20,}+(?:\.[\w-]{2,}+){0,3}",
    r"(?:[spr]k_(?:live|test)|whsec)_[A-Za-z0-9]{10,}+",
    r"AIza[\w-]{30,}+|AQ\.Ab[\w-]{20,}+|ya29\.[\w-]{20,}+|hv[sb]\.[\w-]{20,}+|SG\.[\w-]{16,}+\.[\w-]{16,}+",
    r"(?:sk|xai|pplx)-(?=[a-z_-]{0,64}+[A-Z0-9])[\w-]{20,}+|pypi-(?=[a-z0-9_-]{0,64}+[A-Z])[\w-]{20,}+",
    r"(?:dapi|dkea|dose)[0-9a-f]{32}(?:-\d)?(?![A-Za-z0-9])",
    r"(?:ATATT|ATCTT|ATBB)[\w=-]{20,}+|ABSK[A-Za-z0-9+/]{40,}+=*+",
    r"(?:LTAI|AKLT|AKID)[A-Za-z0-9]{16,}+|(?:bce-v3/)?ALTAK-[A-Za-z0-9]{20,}+(?:/[0-9a-f]{40})?",
    r"(?:ak|as|wk|ws)-(?=[a-z0-9]{0,21}[A-Z])[A-Za-z0-9]{22}(?![\w-])",
    r"[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,40}(?![\w-])",
    r"(?:SK|key-|fc-)[0-9a-f]{32}(?![A-Za-z0-9])|pul-[0-9a-f]{40}(?![A-Za-z0-9])",
    r"dp\.[a-z]{2,5}\.[A-Za-z0-9]{20,}+",
    r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}|[A-Za-z0-9]{14}\.atlasv1\.[\w-]{40,}+",
    r"[A-Za-z0-9_~.]{3}\dQ~[\w~.-]{31,34}",
    r"\d{8,10}:AA[\w-]{33}(?![\w-])",
    rf"{_START_OF_JWT}eyJ(?:(?:rIjoi|hcGlfYWRkcmVzcyI6)[\w-]{{20,}}+=*+|[\w-]{{8,}}+\.[\w-]{{8,}}+(?:\.[\w-]*+)?)",
)
_SHAPES = re.compile(rf"{_PRIVATE_KEY}|{_START}(?:{'|'.join(_TOKENS)})", re.DOTALL)
"""Matches a token or a private key."""

_WEBHOOK = re.compile(
    r"(?i)((?<![\w.-])(?:hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks)/)"
    r"[\w/.~-]{8,}+"
)
_BEARER = re.compile(r"(?i:\b(bearer[ \t]{1,8}))(?=[a-z]*+(?:[A-Z0-9_~+/=-]|\.\w)|[a-z]{20})[\w.~+/-]{8,}+=*+")

_AUTHORITY = re.compile(r":(//?)((?:(?!(?<=[,;|=(\[{<>])[A-Za-z][A-Za-z0-9+.-]{0,15}://)[^\s'\"])++)")
"""The part of a URI after the scheme, up to a space, a quote or the next URI of a list."""
_USER_AND_PORT = re.compile(r"[^:/?#]*+(?::(?P<port>\d{0,5})(?:[/?#]|\Z)|(?P<password>:))?")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}\Z")
_SCHEMES_WITHOUT_PASSWORDS = ("hdfs", "viewfs", "webhdfs", "swebhdfs")
_SCHEMES_WITHOUT_USERS = ("http", "https", "git+http", "git+https", "ws", "wss")
"""In these schemes a user without a password is a token. In abfss and ssh it is a name."""

_ASSIGNED = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]++)="
    r"(?:(?P<value>[^\s'\"`&;,()\[\]{}<>]++)|(?P<quote>['\"])(?P<quoted>[^'\"\n]++)(?P=quote))"
)
"""`NAME=VALUE` of arguments, variables and queries, in which quotes and brackets end the value; `NAME='VALUE'`."""
_IN_QUERY = ("key", "code", "pwd", "pass", "auth")
_COUNT = re.compile(r"[-+]?[\d_]{1,9}(?:\.\d{1,20})?%?")
_NO_SECRET = re.compile(
    r"\*{3}|(?i:none|null|true|false|str|int|bytes|any)|(?:self|args|cls|config|cfg|os|environ|getpass)\.\w.*"
)
_PIECE = re.compile(r"[^\s'\",;:()\[\]{}]+")


def redact_shapes(text: str) -> str:
    """Hide tokens of known formats, private keys, and tokens after `Bearer`."""
    text = _WEBHOOK.sub(rf"\1{REDACTED}", _SHAPES.sub(REDACTED, text))
    return _BEARER.sub(rf"\1{REDACTED}", text)


def redact_users(text: str) -> str:
    """Hide `user:password@` of URIs, even with slashes, and `token@` if the scheme has no named users."""
    return _AUTHORITY.sub(_without_user, text)


def _without_user(match: re.Match[str]) -> str:
    slashes, rest = match.groups()
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    scheme = (_SCHEME.search(match.string, max(0, match.start() - 16), match.start()) or [""])[0].lower()
    last = rest.rfind("@")
    host = authority.rfind("@")
    parts = _USER_AND_PORT.match(rest, host + 1 if ":" not in authority[: host + 1] else 0)
    has_password = parts and parts["password"]
    if parts and parts["port"] is not None:
        name = parts[0].partition(":")[0]
        is_host = name == "localhost" or "." in name or scheme in _SCHEMES_WITHOUT_PASSWORDS
        has_password = not is_host and parts.end() <= last
    if has_password and last > 0:
        return f":{slashes}{REDACTED}{rest[last:]}"
    if host > 0 and (scheme in _SCHEMES_WITHOUT_USERS or _looks_random(rest[:host])):
        return f":{slashes}{REDACTED}{rest[host:]}"
    return match[0]


def redact_assigned(text: str) -> str:
    """Hide values of secret names in `NAME=VALUE`, up to a blank, a quote or a bracket, and in `NAME='VALUE'`."""
    return _ASSIGNED.sub(_without_value, text)


def _without_value(match: re.Match[str]) -> str:
    name = match["name"]
    quote = match["quote"] or ""
    value = match["quoted"] if quote else match["value"]
    is_in_query = match.string[max(0, match.start() - 1) : match.start()] in ("?", "&")
    secrecy = secrecy_of_path(name)
    if is_in_query and name.lower() in _IN_QUERY:
        secrecy = Secrecy.YES
    is_count = secrecy is Secrecy.PERHAPS and _COUNT.fullmatch(value)
    is_ordinary = is_count or value.startswith("=") or value == name or _NO_SECRET.fullmatch(value)
    return match[0] if secrecy is Secrecy.NO or is_ordinary else f"{name}={quote}{REDACTED}{quote}"


def _looks_random(text: str) -> bool:
    """Return whether a piece of the text mixes letters and digits, or is longer than a word."""
    for piece in _PIECE.findall(text):
        is_path = "/" in piece or "\\" in piece
        is_mixed = any(map(str.isdigit, piece)) and any(map(str.isalpha, piece))
        if (len(piece) >= 20 and not is_path) or (len(piece) >= 8 and is_mixed):
            return True
    return False
