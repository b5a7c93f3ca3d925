"""ALiBi: a bias of the logits in place of positions. Only the bodies in plain XLA add it."""

# Why a Mosaic body refuses a call with `alibi_slopes`. The table of bodies shows it.
ALIBI_MISFIT = "only plain XLA adds ALiBi's bias to the logits"
