"""Advantages, losses and divergences: pure functions of tensors, which import no other room."""
