"""A model from a GGUF file with wider heads computes what it did."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.convert_gguf import widen


def test_wider_heads_preserve_model_outputs() -> None:
    torch.manual_seed(1)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=2, head_dim=8, **sizes)
    model = LlamaForCausalLM(config).double()
    tokens = torch.randint(50, (2, 30))
    before = model(tokens).logits

    with pytest.raises(ValueError, match="--head-dim 20 is no multiple of the model's 8"):
        widen(model.state_dict(), config, 20)
    state = widen(model.state_dict(), config, 32)
    wide = LlamaForCausalLM(config).double()
    wide.load_state_dict(state)
    assert wide.config.head_dim == 32
    assert wide.model.layers[0].self_attn.q_proj.weight.shape == (6 * 32, 48)
    torch.testing.assert_close(wide(tokens).logits, before, atol=1e-5, rtol=0)
