"""The op `mla_decode`: multi-head latent attention of decode tokens, over the latent cache."""
