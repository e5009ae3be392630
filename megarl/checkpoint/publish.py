"""Publishes an exported model as a repository of the Hugging Face hub. HF_ENDPOINT names another hub."""

import shlex
from pathlib import Path

from megarl.platform.errors import UserError


def check_name(name: str) -> None:
    """Check the name of a repository, and ask no host.

    Raises:
        UserError: `name` is not OWNER/NAME in characters that the hub allows.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # a lazy export

    if name.count("/") != 1:
        raise UserError(f"{name} is not OWNER/NAME, the name of a repository of the Hugging Face hub")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"the Hugging Face hub allows no such name: {error}") from error


def create_repository(name: str, *, private: bool) -> None:
    """Create the repository of a model, unless it exists.

    Raises:
        UserError: there is no token, the hub is out of reach or refuses the token, or a repository that is to be
            private is public.
    """
    from huggingface_hub import HfApi, get_token

    if not get_token():
        raise UserError("there is no token of the Hugging Face hub: set HF_TOKEN, or run `hf auth login`")
    api = HfApi()
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        api.auth_check(name, write=True)  # an existing repository may be somebody else's
        is_public = private and not api.model_info(name).private
    except Exception as error:  # the hub's client has errors of several libraries
        raise UserError(
            f"{api.endpoint} gives no repository {name} to write to: {_reason(error)}; check the network, and that "
            "the token (HF_TOKEN, or of `hf auth login`) may write there"
        ) from error
    if is_public:
        raise UserError(f"{name} exists and is public: make it private on its page, or leave out --private")


def upload(out: Path, name: str) -> str:
    """Upload a directory to an existing repository, and return the address of the repository.

    Raises:
        UserError: the upload fails; the directory stays as it is.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.upload_folder(repo_id=name, folder_path=out, commit_message="Upload a model that megarl exported")
    except Exception as error:  # the hub's client has errors of several libraries
        raise UserError(
            f"the upload to {name} failed: {_reason(error)}\n{out} is complete; upload it later with\n"
            f"  hf upload {name} {shlex.quote(str(out))}"
        ) from error
    return f"{api.endpoint}/{name}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
