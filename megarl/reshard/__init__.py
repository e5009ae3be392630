"""Transfer of sharded parameters between any two ways of sharding; knows boxes and bytes, but no models."""
