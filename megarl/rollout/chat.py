"""An engine of one process for people: it loads an exported model and its tokenizer, and responds to texts."""

from collections.abc import Sequence
from pathlib import Path

from megarl.platform.errors import UserError
from megarl.platform.imports import import_error, import_modules
from megarl.rollout import patches

CACHE_BYTES = 1 << 30
"""Memory for the keys and values of the engine on CPU."""


class ChatEngine:
    """A model that responds to one text or conversation at a time."""

    def __init__(self, model_dir: Path, *, trust_remote_code: bool) -> None:
        """Load the model. Raises UserError if vLLM does not load it."""
        patches.prepare_environment()
        import_modules(("vllm.entrypoints.llm",))
        from vllm import LLM  # reads its environment when it is imported
        from vllm.platforms import current_platform

        arguments: dict[str, object] = {"kv_cache_memory_bytes": CACHE_BYTES} if current_platform.is_cpu() else {}
        try:
            with patches.start_isolated():
                self._llm = LLM(
                    model=str(model_dir),
                    trust_remote_code=trust_remote_code,
                    enforce_eager=True,
                    max_num_seqs=1,
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                    **arguments,
                )
        except (ValueError, OSError) as error:
            raise UserError(f"vLLM does not load {model_dir}: {error}") from error
        except ImportError as error:
            raise import_error(error.name or "a package", error) from error
        self.has_template = bool(self._llm.get_tokenizer().chat_template)

    def respond(
        self, prompt: str | Sequence[dict[str, str]], *, temperature: float, max_tokens: int, seed: int | None
    ) -> str:
        """Return the response to a text, or to messages `{role, content}`.

        Raises UserError if the prompt leaves no room for a response.
        """
        from vllm import SamplingParams

        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        if isinstance(prompt, str):
            (output,) = self._llm.generate([prompt], params, use_tqdm=False)
        else:
            (output,) = self._llm.chat(list(prompt), params, use_tqdm=False)
        text: str = output.outputs[0].text
        return text
