"""No part of a secret is left in a text, for any secret and any notation, and redaction takes linear time."""

import base64
import html
import json
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.platform.secret_values import MIN_VALUE
from megarl.platform.secrets import REDACTED, is_secret, redact, redacted
from tests.support.programs import ROOT

NO_VARIABLES: dict[str, str] = {}
PIECE = 6


def words(text: str) -> list[str]:
    return text.split()


SECRET_NAMES = words(
    """
         OPENAI_KEY DB_PASS DB_PWD MYSQL_PWD AWS_CREDENTIALS HF_TOKENS API_KEYS TOKEN_1 HF_TOKEN_READ SECRET_X
    API_TOKEN HF_TOKEN     MY_SECRET_VALUE PASSWORD_PROD TOKEN TOKENS PGPASSWORD AWS_SECRET_ACCESS_KEY
    AWS_ACCESS_KEY_ID AccountKey apiKey APIKey     x-api-key api_keys tokens credentials credential creds pass auth
    HTTP_AUTH hf_token clientSecret Authorization     WANDB_API_KEY OPENAI_API_KEY_2 ANTHROPIC_KEY openai_key
    SLACK_WEBHOOK_URL GITHUB_PAT private_key X-Amz-Signature sig     X-Amz-Security-Token dbpassword passphrase
    REDIS_PASS TOKEN_GITHUB api_key_prod SSH_KEY access-token MODAL_TOKEN_SECRET
    """
)
ORDINARY_NAMES = words(
    """
         TOKENIZERS_PARALLELISM KEYBOARD MONKEY MAX_TOKENS PWD OLDPWD PATH HOME SSH_AUTH_SOCK KEY PASSWORD_FILE
    TOKEN_PATH     max_tokens num_tokens total_num_tokens prompt_tokens completion_tokens eos_token pad_token_id
    eos_token_id stop_token_ids     skip_special_tokens max_num_batched_tokens ppo_max_token_len_per_gpu
    moe_token_dispatcher_type calculate_per_token_loss     prompt_key reward_fn_key num_key_value_heads PUBLIC_KEY
    SORT_KEY tokenizer bypass compass first_passage author secretary     authentication_mode passed keys
    token_level_scores PASSED COMPASS AUTHOR HF_TOKEN_FILE cache_key OAUTH_TOKEN_URL
    """
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_name_that_tells(name: str) -> None:
    assert is_secret(name)
    assert redacted({"engine": {name: "abc", "n": 1}}, NO_VARIABLES) == {"engine": {name: REDACTED, "n": 1}}
    assert redact(f"found {name}=Sw0rdf1sh-quiet here", NO_VARIABLES) == f"found {name}={REDACTED} here"
    for sign in "'\"":
        shown = redact(f"Client({name}={sign}Sw0rdf1sh quiet{sign}, n=1)", NO_VARIABLES)
        assert shown == redact(shown, NO_VARIABLES) == f"Client({name}={sign}{REDACTED}{sign}, n=1)"
    assert redact(f"at {HIDDEN} now", {name: f" {HIDDEN}\n"}) == f"at {REDACTED} now"


@pytest.mark.parametrize("name", ORDINARY_NAMES)
def test_a_name_that_does_not_tell(name: str) -> None:
    assert not is_secret(name)
    assert redact(f"{name}=Sw0rdf1sh {HIDDEN}", {name: HIDDEN}) == f"{name}=Sw0rdf1sh {HIDDEN}"


HIDDEN = "Swordf1sh/quiet+"
ANY_CHARACTERS = st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), min_size=MIN_VALUE + 4, max_size=40)
NASTY = st.text(alphabet="aB3'\"\\\n\t/+@:#?%&=;, {}[]()$`!é~-_.", min_size=MIN_VALUE + 4, max_size=40)
VALUES = (ANY_CHARACTERS | NASTY).map(str.strip).filter(lambda text: len(set(text)) >= MIN_VALUE)
FORMS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "repr": repr,
    "bytes": lambda text: repr(text.encode()),
    "list": lambda text: repr([text, 1]),
    "message that quotes one": lambda text: repr(f"KeyError({text!r})"),
    "JSON": json.dumps,
    "JSON as it is": lambda text: json.dumps({"a": text}, ensure_ascii=False),
    "JSON in JSON": lambda text: json.dumps(json.dumps({"a": text})),
    "percent": lambda text: quote(text, safe=""),
    "percent of a path": quote,
    "percent of a query": quote_plus,
    "small percent": lambda text: re.sub("%..", lambda match: match[0].lower(), quote(text, safe="")),
    "percent twice": lambda text: quote(quote(text, safe=""), safe=""),
    "ASCII of Python": ascii,
    "JSON with large hexadecimals": lambda text: re.sub(
        r"\\u[0-9a-f]{4}", lambda match: match[0][:2] + match[0][2:].upper(), json.dumps(text)
    ),
    "JSON of PHP": lambda text: json.dumps(text).replace("/", "\\/"),
    "JSON of Go": lambda text: re.sub(
        "[<>&]", lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False)
    ),
    "HTML": html.escape,
    "shell": shlex.quote,
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "basic": lambda text: base64.b64encode(f"ann:{text}".encode()).decode(),
    "base64 of a URL": lambda text: base64.urlsafe_b64encode(f"{{{text}}}".encode()).decode(),
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30)
@given(value=VALUES)
def test_the_value_of_a_variable_in_any_form(form: str, value: str) -> None:
    written = FORMS[form](value)
    shown = redact(f"begin {written} end", {"MY_TOKEN": f"{value}\n"})
    assert shown.startswith("begin ") and shown.endswith(" end") and REDACTED in shown
    assert not pieces(FORMS["plain"](value)) & pieces(shown)
    assert len(shown) <= len("begin  end") + 3 * len(REDACTED) + 24  # nothing of it, however it was written


def pieces(text: str) -> set[str]:
    """Return the parts of a secret that no text may show."""
    return {text[start : start + PIECE] for start in range(len(text) - PIECE + 1)}


RANDOM = st.text(alphabet=string.ascii_letters + string.digits + "-_.~", min_size=20, max_size=48)
BODY = st.text(alphabet=string.ascii_letters + string.digits, min_size=40, max_size=60).map(lambda text: f"{text}Aa1")
WORDS = RANDOM.map(lambda text: f"q{text}Z9")
IN_URIS = st.text(alphabet=string.ascii_letters + string.digits + "/:#?%+=@!$*", min_size=12, max_size=40)
TEXTS: dict[str, tuple[st.SearchStrategy[str], Callable[[str], str]]] = {
    "user": (WORDS, lambda secret: f"clone https://{secret}@host/a.git"),
    "password": (IN_URIS.map(lambda text: f"q{text}Z"), lambda secret: f"open s3://ann:{secret}@bucket/a.parquet now"),
    "password of digits and a slash": (WORDS, lambda secret: f"open s3://u:123/{secret}@h, s3://c/d"),
    "password of pathlib": (IN_URIS.map(lambda text: f"q{text}Z"), lambda secret: f"no s3:/ann:{secret}@bucket/a"),
    "bearer": (WORDS, lambda secret: f"Authorization: Bearer {secret}"),
    "option": (WORDS, lambda secret: f"run --api-key={secret} --steps 3"),
    "variable": (WORDS, lambda secret: f"env DB_PASS={secret} run"),
    "key of the configuration": (WORDS, lambda secret: f"+rollout.engine_kwargs.hf_token={secret}"),
    "query": (WORDS, lambda secret: f"GET https://host/a?n=1&token={secret}&m=2"),
    "AWS": (
        st.text(alphabet=string.ascii_letters + string.digits + "+/", min_size=40, max_size=40),
        lambda secret: f"AKIAIOSFODNN7EXAMPLE:{secret}",
    ),
    "key block": (
        WORDS,
        lambda secret: f"-----BEGIN OPENSSH PRIVATE KEY-----\n{secret}\n-----END OPENSSH PRIVATE KEY-----",
    ),
    "JWT": (BODY, lambda secret: f"eyJhbGciOiJIUzI1NiJ9.eyJ{secret}.{secret}"),
    "Slack": (BODY, lambda secret: f"POST https://hooks.slack.com/services/T01/B02/{secret} failed"),
    "SAS": (BODY, lambda secret: f"https://a.blob.core.windows.net/c?sv=2024&sig={secret}%3D&se=2026"),
    "webhook": (WORDS, lambda secret: f"https://discord.com/api/webhooks/123456789/{secret}"),
} | {
    prefix: (BODY, lambda secret, prefix=prefix: f"it refused {prefix}{secret}, so")
    for prefix in words(
        "sk- sk-ant-api03- sk-proj- sk-or-v1- npm_ sk_live_ rk_live_ sk_test_ pypi- ghp_ gho_ ghs_ github_pat_ glpat- "
        "hf_ xoxb- xoxp- xapp-1- gsk_ AIza whsec_ hvs. ya29. r8_ xai- pplx- tgp_v1_ nvapi- fw_ tvly-dev- rpa_ "
        "wandb_v1_ lsv2_pt_ lsv2_sk_ jina_ figd_ sb_secret_ fm2_ lin_api_ ntn_ rubygems_ sbp_ GOCSPX- AQ.Ab "
        "tskey-auth- pcsk_ csk- ATATT3x ATCTT3x ABSK AKLT dp.pt. a1b2c3d4e5f6g7.atlasv1. pscale_tkn_ "
        "sntrys_ dop_v1_ NRAK- HRKU- gldt-"
    )
}
HEX = "".join(f"{7 * place % 16:x}" for place in range(100))
MIXED = ("aB3dE5gH7jK9mN1pQ3sT5vW7xY9z" * 3)[:80]
OF_FIXED_LENGTH = {
    "Databricks": f"dapi{HEX[:32]} dapi{HEX[:32]}-2",
    "Grafana": f"glsa_{MIXED[:32]}_{HEX[:8]} glc_{MIXED}==",
    "Shopify": f"shpat_{HEX[:32]} shpss_{HEX[:32]}",
    "Atlassian": f"ATATT3xFfGF0{MIXED}-_{MIXED[:9]}=1A2B3C4D",
    "GitLab": f"glpat-{MIXED[:27]}.01.{MIXED[:9]}",
    "AWS": f"AKIA{HEX[:16].upper()} ABSK{MIXED}{MIXED}==",
    "Azure": f"abC8Q~{MIXED[:34]}",
    "LangSmith": f"lsv2_pt_{HEX[:32]}_{HEX[:10]}",
    "OpenAI": f"sk-proj-{MIXED}_{MIXED} sk-{HEX[:48]}",
    "mail, telephone, chat": f"key-{HEX[:32]} SK{HEX[:32]} 123456789:AA{MIXED[:33]}",
    "Discord": f"MTIzNDU2Nzg5MDEyMzQ1Njc4OTA.GabcDE.{MIXED[:38]}",
    "clouds": f"LTAI5t{MIXED[:18]} AKID{MIXED[:32]} bce-v3/ALTAK-{MIXED[:21]}/{HEX[:40]}",
    "devices": f"ak-{MIXED[:22]} as-{MIXED[:22]} e2b_{HEX[:40]} sk_{HEX[:48]} fc-{HEX[:32]}",
    "tables": f"pat{MIXED[:14]}.{HEX[:64]} PMAK-{HEX[:24]}-{HEX[:34]} pul-{HEX[:40]}",
}


BEFORE = ("\\n", "\\t", "\\r", "\\x1b", "\\u001b", "%20", "%3D", "%253D", "line\\n", "key=%20")
"""Escapes that write a blank, a newline or another sign in letters."""


@pytest.mark.parametrize("service", OF_FIXED_LENGTH)
def test_tokens_of_a_fixed_form_are_hidden(service: str) -> None:
    for token in OF_FIXED_LENGTH[service].split():
        for before in ("it refused (", *BEFORE):
            shown = redact(f"{before}{token}): why?", NO_VARIABLES)
            assert REDACTED in shown
            assert not pieces(token[10:]) & pieces(shown), shown


@pytest.mark.parametrize("place", TEXTS)
@settings(max_examples=20)
@given(data=st.data())
def test_no_piece_of_a_secret_remains(place: str, data: st.DataObject) -> None:
    secrets, write = TEXTS[place]
    secret = data.draw(secrets)
    for before, after in (("", ""), ("rank 3: ", " (step 4)"), ("('", "')")):
        shown = redact(before + write(secret) + after, NO_VARIABLES)
        assert not pieces(secret) & pieces(shown), shown
        assert REDACTED in shown
        assert redact(shown, NO_VARIABLES) == shown


ORDINARY = r"""
step 12/40 reward 0.500 tokens: 123 max_tokens: 512 kl 0.01 perf/total_num_tokens:1024 lr=1e-06 actor/entropy: 0.3
{"usage": {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17}, "tokens": 17, "tokens": [1, 2, 3]}
the token is a word, a token: the, next token: international; unknown token: x; the key: y; token: 5; tokens = 12
Secret: I never liked it. The password is wrong; authorization: required; a forward pass: 3.2 s; signature: (a, b) -> c
the bearer instruments and bearer certificates; basic token counts: 3, 4; author: Ann; the answer: \boxed{42}; key: v
\frac{a}{b} = \sqrt{c}, x' = y'' : {(a, b): [c]}; f(x) := {x | x > 0}; $a: b$; 12:30:45; C:\Users\ann; 3:4 = 6:8
def login(user: str, password: str, token: Optional[str] = None) -> int: return check(password=None, token=token)
password = input("Password? "), secret = os.environ["SECRET"], token = self.tokens[3], api_key = getenv("API_KEY")
if token == "the" and key != 'b': tokens += 1; d["token"] = 3; print(f"{token}"); keys: ['a', 'b']; pass
/home/ann/secrets/readme.md tests/unit/test_platform_secrets.py s3://bucket/token/a.parquet hf://datasets/a/b@main/c
http://localhost:5000/x@y http://mlflow.example.com:5000/#/runs/a@b ssh://git@host/a.git abfss://data@lake.dfs.core/x
ann@host.org, git@github.com:a/b.git, user@10.0.0.1:22, torch==2.13.0+cpu, sk-learn, task-specific-long-hyphenated-words
sk-estimator-doc-link-container risk-adjusted-something-longer pypi-attestation-models-client hf_hub npm_config_registry
--steps 3 --tokenizer models/a --max-tokens 512 --check; <answer>3 + 4</answer> <think>token by token</think>
moe_token_dispatcher_type=alltoall loss_agg_mode=token-mean stop_token_ids=[1, 2] eos_token='</s>' data.prompt_key=p
glc_color_space_conversion_table fw_version_of_the_device_tree dp.to.device NO-OP MNO-1234.abcdef.x as-is-and-where-is
SKILL key-value-store fc-layer-of-the-model csk-1 ak-47 tvly pul-down pattern.of.words atlasv1 jina_ai fm2_ x.8Q
data:image/png;base64,iVBORw0KGgo= sha256:9f86d081884c7d659a2feaa0c55ad015 SHA-256: 1b4f0e98 uuid 123e4567-e89b-12d3
""".strip().splitlines()


def test_ordinary_lines_stay_as_they_are() -> None:
    environ = {"TOKENIZERS_PARALLELISM": "false", "PWD": "/home/ann", "KEYBOARD": "token by token", "API_KEY": "short"}
    assert [redact(line, environ) for line in ORDINARY] == ORDINARY
    assert redact("\n".join(ORDINARY), environ) == "\n".join(ORDINARY)


def test_the_name_of_a_file_is_no_secret() -> None:
    environ = {"GOOGLE_APPLICATION_CREDENTIALS": __file__, "OTHER_CREDENTIALS": "/no/such/path"}
    assert redact(f"{__file__} and /no/such/path", environ) == f"{__file__} and {REDACTED}"


UNITS = (
    *("http://", "s3://a:", "s3://a:a@", ":/", "@", "a@", ",a://", "{", "[", "(", "'", '"', '\\"', "\\", "'\"'\"'"),
    *("sk-", "sk-ant-", "sk_live_", "pypi-", "npm_", "ghp_", "github_pat_", "glpat-", "hf_", "xoxb-", "AKIA", "AIza"),
    *(
        "fw_",
        "wandb_v1_",
        "lsv2_pt_",
        "glc_",
        "dapi",
        "dapi0",
        "ATATT",
        "0123456789",
        "1:AA",
        "a.atlasv1.",
        "8Q~",
        "M.a",
    ),
    *("\\n", "\\neyJ", "\\u001bsk-", "%20hf_", "%253DeyJ", "_eyJ", "a_eyJ", "eyJa_", "a_b_c_eyJ"),
    *("eyJ", "eyJaaaaaaaa.", "eyJaaaaaaaa-", "SG.", "SG.aaaaaaaaaaaaaaaa", "-----BEGIN ", "hvs."),
    *("-----BEGIN RSA PRIVATE KEY-----", "hooks.slack.com/services/", "bearer ", "Bearer ab", "Authorization: Bearer "),
    *("token", "token=", "token: ", "tokens=[", 'token="', "password=", "password=self.", "api_key={", "a.b=", "a=b="),
    *("--", "--api-key=", "-", ".", "_", "a_", "=", "?key=", "&", ";a", ",a", "\n", " ", "a ", "A", "1", "é", "%2F"),
    *("aaaaaaaaaaaaaaaaaaaa", "***", "***@", "KEY_", "tokenSecret", "A1", "a:"),
)
LENGTH, CPU_S = 75_000, 2
"""Redaction of a text of this length takes a fraction of a second; what is quadratic takes minutes."""
PROGRAM = f"""
import resource, sys
from megarl.platform.secrets import redact

text, value = sys.stdin.read().split("\\0")
for whole in text.split("\\1"):
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + {CPU_S}, -1))  # at this bound the kernel kills
    redact(whole * ({LENGTH} // len(whole)), {{"MY_TOKEN": value}})
"""


def spend(*units: str) -> None:
    """Redact a long text of each unit in a process that may use CPU_S seconds of a processor for each."""
    content = "\1".join(units) + "\0" + "abcdefgh" * 4
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, input=content, text=True, check=True)


@pytest.mark.timeout(1800)
def test_redaction_takes_linear_time_for_any_text() -> None:
    spend(*UNITS)
    with pytest.raises(subprocess.CalledProcessError):  # the bound is one
        subprocess.run(
            [sys.executable, "-c", PROGRAM.replace("redact(whole", "sum(range(10**12)), redact(whole")],
            cwd=ROOT,
            input="a\0b",
            text=True,
            check=True,
        )


@pytest.mark.timeout(1800)
@settings(max_examples=3, deadline=None)
@given(st.lists(st.lists(st.sampled_from(UNITS), min_size=1, max_size=4).map("".join), min_size=20, max_size=20))
def test_time_is_linear_for_mixtures_too(units: list[str]) -> None:
    spend(*units)
