"""The sync of the actor's weights to the engines: the plan, the transfer, the self-check and the verification."""
