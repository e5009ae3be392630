"""The dotted paths of keys and sections that several rules name."""

from megarl.config.mesh_checks import SIZES

POLICY = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
REWARD = "reward_model"
CRITIC_WARM_UP = "trainer.critic_warmup"
WORLD = ("trainer.nnodes", "trainer.n_gpus_per_node")
MESH = tuple(f"{ACTOR}.megatron.{size}" for size in SIZES)
LAYERS = f"{ACTOR}.megatron.override_transformer_config"
