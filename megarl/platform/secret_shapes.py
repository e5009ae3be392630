"""The formats of tokens and private keys of services that a run may meet.

Each begins with letters that only this service uses. A search takes time linear in the text: tails are possessive or
have a fixed length, and what may follow a tail is bounded.
"""

import re

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
SHAPES = re.compile(rf"{_PRIVATE_KEY}|{_START}(?:{'|'.join(_TOKENS)})", re.DOTALL)
"""Matches a token or a private key."""
